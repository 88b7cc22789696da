"""Every port of examples/: which public script it follows, and what `verify` says of it. `make ports` runs it.

    python tests/examples/table.py [--only NAMES] [--out results/FOLDER] [--write]

Prints the coverage table. --out keeps the record (record.json); --write replaces the table in docs/porting.md by that
of its newest record, in docs/zh/porting.md, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

import samestep
from fork_servers import fork_servers

ROOT = Path(__file__).parents[2]
YES, NATURE, NO = "yes", "no, as expected", "no"
EXAMPLES = ROOT / "examples"
PAGES = (ROOT / "docs" / "porting.md", ROOT / "docs" / "zh" / "porting.md")
HEAD = "| port of | how | `verify`: engine | `verify`: one process | command |"


@dataclass(frozen=True)
class Port:
    """A public script as a Job. how: 'as is', 'with …' (what the port changes) or 'not yet: …' (why).

    file: in examples/, with its function; '' for a script that cannot be said. answer: to whether N ranks
    train what one process trains. settings: for a proof of a second. engines: proven on 2 ranks; `ddp` on 3 ranks, too.
    """

    of: str
    how: str
    file: str = ""
    answer: str = YES
    settings: Mapping[str, str] = field(default_factory=dict)
    engines: tuple[str, ...] = ("ddp", "fsdp")


ROWS16 = {"batch_size": "16"}
PORTS: dict[str, Port] = {
    "plain": Port("a script for one GPU", "as is", "plain/job.py", settings=ROWS16),
    "nanogpt": Port("nanoGPT", "with windows drawn once", "nanogpt/job.py:small"),
    "accelerate_nlp": Port(
        "Accelerate's nlp_example: BERT, dynamic padding",
        "as is",
        "accelerate_nlp/job.py",
        settings={"layers": "1", "hidden": "16", "dropout": "0", "batch_size": "8"},
    ),
    "mnist": Port("pytorch/examples: mnist", "as is", "mnist.py", answer=NATURE, settings=ROWS16),
    "imagenet": Port(
        "pytorch/examples: imagenet",
        "as is",
        "imagenet.py",
        answer=NATURE,
        settings={"batch_size": "12", "size": "16", "width": "4"},
    ),
    "word_lm": Port(
        "pytorch/examples: word_language_model",
        "as is: carry_state=, order=Lanes; evaluated with a state of zeros for each window",
        "word_lm.py",
        settings=ROWS16,
    ),
    "vae": Port("pytorch/examples: vae", "with its sum divided by the rows", "vae.py", answer=NATURE, settings=ROWS16),
    "siamese": Port("pytorch/examples: siamese_network", "with pairs drawn by row", "siamese.py", settings=ROWS16),
    "superres": Port("pytorch/examples: super_resolution", "as is", "superres.py", settings=ROWS16),
    "gcn": Port("pytorch/examples: gcn", "with the graph as the model's buffers", "gcn.py"),
    "vit": Port("vit-cifar10 scripts", "as is", "vit.py", settings=ROWS16 | {"width": "16", "depth": "1"}),
    "unet": Port("milesial/Pytorch-UNet", "with Dice of each image", "unet.py", settings={"width": "4"}),
    "lora": Port("microsoft/LoRA, peft", "as is", "lora.py", settings=ROWS16),
    "dpo": Port("DPO, trl", "with policy and reference in one module", "dpo.py", settings={"batch_size": "8"}),
    "distill": Port("torch's distillation tutorial", "with both networks in one module", "distill.py", settings=ROWS16),
    "moe": Port("mixture of experts", "with balance over each sequence", "moe.py", settings={"batch_size": "8"}),
    "ddpm": Port("ddpm scripts", "with noise drawn by row", "ddpm.py", settings=ROWS16),
    "autoencoder": Port("denoising autoencoders", "with noise drawn by row", "autoencoder.py", settings=ROWS16),
    "tagger": Port("torch's LSTM tagger, padded", "with a row's words as its weight", "tagger.py"),
    "buckets": Port("group_by_length: batches of like lengths", "as is: order=ByLength", "buckets.py"),
    "textcnn": Port("Kim's text CNN, class weights", "with a row's class weight", "textcnn.py", settings=ROWS16),
    "ctc": Port("CRNN and DeepSpeech: CTC", "as is", "ctc.py", settings={"batch_size": "8"}),
    "regression": Port("regression on a table", "as is", "regression.py", settings=ROWS16),
    "binary": Port("binary classifier, BCELoss on a sigmoid", "as is", "binary.py", settings=ROWS16),
    "recommender": Port("MovieLens factorisation", "as is", "recommender.py", settings=ROWS16),
    "bandit": Port("offline contextual bandit", "as is", "bandit.py", settings=ROWS16),
    "clip": Port(
        "CLIP, open_clip",
        "with the features of all ranks (`gather_outputs`)",
        "clip.py",
        settings=ROWS16,
    ),
    "tagger unweighted": Port(
        "the same tagger as it is usually written",
        "not: a mean over each rank's words is no mean over all words; give weights",
        "tagger.py",
        answer=NO,
        settings={"weighted": "false"},
    ),
    "moe batch": Port(
        "Switch Transformers' balance over the batch",
        "with the gates of all ranks (`gather_outputs`)",
        "moe.py",
        settings={"balance": "batch", "batch_size": "8"},
    ),
    "ema": Port("timm and swa_utils: averaged weights (EMA)", "as is: ema=", "ema.py", settings=ROWS16),
    "dcgan": Port(
        "pytorch/examples: dcgan",
        "with both networks in one module, and noise drawn by row (`phases`)",
        "dcgan.py",
        answer=NATURE,
        settings=ROWS16 | {"width": "4"},
    ),
    "pointnet": Port(
        "fxia22/pointnet.pytorch: train_segmentation",
        "as is",
        "pointnet.py",
        answer=NATURE,
        settings=ROWS16 | {"width": "4", "points": "32"},
    ),
    "sines": Port(
        "pytorch/examples: time_sequence_prediction",
        "as is: LBFGS",
        "sines.py",
        settings={"waves": "16", "length": "12", "hidden": "5"},
        engines=("ddp", "accelerate"),
    ),
    "reinforce": Port("pytorch/examples: reinforcement_learning", "not: no dataset; rows are what the policy did"),
}
LEARNT = [name for name, port in PORTS.items() if port.file]


@dataclass(frozen=True)
class Proven:
    """What `verify` said of a port on one number of ranks.

    verdicts: engine -> 'same (bitwise)', 'differs', … answer, reason: whether N ranks train what one process trains.
    """

    port: str
    ranks: int
    verdicts: Mapping[str, str]
    answer: str
    reason: str
    seconds: float


def prove(name: str, ranks: int, engines: tuple[str, ...], folder: Path) -> Proven:
    """Verifies a port, as the command does."""
    port, began = PORTS[name], time.monotonic()
    settings = dict(port.settings)
    if name == "imagenet":
        settings["data"] = str(write_images(folder / "images"))
    out = folder / re.sub(r"\W", "_", f"{name}{ranks}")
    results = samestep.verify(EXAMPLES / port.file, engines, nproc=ranks, settings=settings, device="cpu", out=out)
    rows = {row.engine: row for row in results.engines}
    verdicts = {each: "same (bitwise)" if row.bitwise else row.verdict for each, row in rows.items()}
    print(*(f"{each}: {row.reason}" for each, row in rows.items() if row.reason))  # which pytest shows of a failure
    compared = results.same_as_one_process
    assert compared is not None, f"{name}: whether {ranks} ranks train as one process was not compared"
    seconds = round(time.monotonic() - began, 1)
    return Proven(name, ranks, verdicts, compared.answer, str(compared.reason or ""), seconds)


def write_images(folder: Path) -> Path:
    """Writes a folder of classes, as ImageNet has them: 16 x 16 pixels, brighter for a higher class."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for part, rows in (("train", 42), ("val", 12)):
        for row in range(rows if not folder.exists() or not (folder / part).exists() else 0):
            place = folder / part / f"class{row % 3}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 60, (16, 16, 3)) + 60 * (row % 3)
            Image.fromarray(pixels.astype(np.uint8)).save(place / f"{row:03}.png")
    return folder


def rows_of(record: list[Proven]) -> list[str]:
    """The lines of the coverage table: one for each port, whether it can be said or not."""
    lines = [HEAD, "|---|---|---|---|---|"]
    for name, port in PORTS.items():
        found = [each for each in record if each.port == name]
        if not found:
            lines.append(f"| {port.of} | {port.how} | – | – | – |")
            continue
        engines = "; ".join(f"{each.ranks} ranks: {_said(each.verdicts)}" for each in found)
        (answer,) = {each.answer for each in found}
        answer += f": {found[0].reason}" if found[0].reason else ""
        given = "".join(f" --set {key}={text}" for key, text in port.settings.items() if key not in SIZES)
        data = " --set data=FOLDER" if name == "imagenet" else ""
        lines.append(
            f"| {port.of} | {port.how} | {engines} | {answer} | `samestep verify examples/{port.file}{data}{given}` |"
        )
    return lines


def _said(verdicts: Mapping[str, str]) -> str:
    """'ddp, fsdp same (bitwise)'"""
    by_text: dict[str, list[str]] = {}
    for engine, text in verdicts.items():
        by_text.setdefault(text, []).append(engine)
    return ", ".join(f"{', '.join(engines)} {text}" for text, engines in by_text.items())


# Of the proof: not what the port is about.
SIZES = {"batch_size", "width", "depth", "size", "layers", "hidden", "points", "waves"}


def newest() -> Path:
    """The record that docs/porting.md names."""
    (named,) = set(re.findall(r"results/ports[^/)`]+", PAGES[0].read_text()))
    return ROOT / named / "record.json"


def read(path: Path) -> list[Proven]:
    rows = [Proven(**row) for row in json.loads(path.read_text())["proven"]]
    return [replace(row, answer=NATURE) if row.answer == "by nature no" else row for row in rows]  # its older name


def write_pages(record: list[Proven]) -> None:
    for page in PAGES:
        head, _, rest = page.read_text().partition(HEAD)
        after = re.sub(r"\A(\n\|.*)*", "", rest)
        page.write_text(head + "\n".join(rows_of(record)) + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="ports, separated by commas")
    parser.add_argument("--out", type=Path, help="keep the record in this folder")
    parser.add_argument("--write", action="store_true", help="write the tables of the docs from the newest record")
    options = parser.parse_args()
    if options.write:
        write_pages(read(newest()))
        return
    chosen = options.only.split(",") if options.only else LEARNT
    record: list[Proven] = []
    with tempfile.TemporaryDirectory() as folder, fork_servers():
        for name in chosen:
            for ranks, engines in ((2, PORTS[name].engines), (3, ("ddp",))):
                record.append(prove(name, ranks, engines, Path(folder)))
                print(record[-1], file=sys.stderr, flush=True)
    print("\n".join(rows_of(record)))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        kept = {"torch": torch.__version__, "cores": os.cpu_count(), "proven": [asdict(each) for each in record]}
        (options.out / "record.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
