"""Does each built-in job learn, do 1, 2 and 3 ranks learn the same, and is every engine's step the reference's?

    python benchmarks/jobs.py --data FOLDER [--out results/NAME] [--only JOB,JOB] [--ranks 1,2,3]

FOLDER holds images/ (train/CLASS/*, test/CLASS/*: 32x32, for cifar10 and imagefolder), imdb/ (train.tsv, test.tsv) and
text.txt; a job whose data is not there is left out, and said so. Each job trains at a small size under `ddp` on each
number of ranks, is evaluated after each epoch, and is verified on 2 ranks under every engine that runs here. What --out
holds of other jobs already is kept.

Prints what each came to, and by how much the numbers of ranks differ; --out writes raw.json (every curve, every
verdict, the machine, the versions), table.txt and curves.png. Exit code 1 when a training failed or an engine differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from samestep.rank import hardware

# name -> (job, its data, its settings for some two minutes on 2 cores, those for a proof). BatchNorm takes its
# statistics from a rank's own rows, so that with it a training does depend on the ranks; with GroupNorm it does not.
# Rounding does, and a deep network amplifies it: in float64 one sees that nothing else is different.
FLOAT64 = str(Path(__file__).with_name("float64.py"))
IMAGES = {"epochs": 5, "width": 8, "workers": 1, "lr": 0.02}
GROUP = IMAGES | {"norm": "group"}
FOLDER = GROUP | {"size": 32, "global_batch": 128}
TINY = {"width": 4, "workers": 0, "global_batch": 16}
SMALL: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "charlm": ("charlm", "text.txt", {"limit": 4000, "epochs": 3}, {"limit": 400, "width": 32, "global_batch": 16}),
    "imdb": ("imdb", "imdb", {}, {"width": 64, "layers": 1, "length": 32, "global_batch": 16}),
    "imdb float64": (f"{FLOAT64}:imdb", "imdb", {}, {}),
    "cifar10": ("cifar10", "images", GROUP, TINY),
    "cifar10 float64": (f"{FLOAT64}:cifar10", "images", GROUP | {"epochs": 2}, {}),
    "cifar10 BatchNorm": ("cifar10", "images", IMAGES, {}),
    "imagefolder": ("imagefolder", "images", FOLDER, TINY | {"size": 32}),
    "imagefolder float64": (f"{FLOAT64}:imagefolder", "images", FOLDER | {"epochs": 2}, {}),
}
DEADLINE_S = 1800
WIDTH = 150


def samestep(*arguments: str, out: Path) -> dict[str, Any]:
    """The JSON that one command prints. Raises RuntimeError with its last words where it fails."""
    command = [sys.executable, "-m", "samestep", *arguments, "--json", "--out", str(out)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if found.returncode not in (0, 1) or not found.stdout.strip():
        raise RuntimeError(f"{' '.join(command)}: {found.stderr.strip()[-2000:]}")
    answer: dict[str, Any] = json.loads(found.stdout)
    return answer


def given(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def trained(job: str, settings: dict[str, Any], ranks: int, folder: Path) -> dict[str, Any]:
    """Curve and seconds of one training."""
    engine = ["--engine", "ddp", "--nproc", str(ranks)]
    found = samestep("run", job, *engine, "--device", "cpu", *given(settings), out=folder / "run")
    kept = ("curve", "steps", "seconds", "wait_share", "world_size", "evaluation_rows")
    return {name: found[name] for name in kept}


def verified(job: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Engine -> its verdict on 2 ranks."""
    found = samestep("verify", job, "--engines", "all", "--nproc", "2", "--device", "cpu", *given(settings), out=folder)
    kept = ("verdict", "bitwise", "max_difference", "reason")
    return {row["engine"]: {name: row.get(name) for name in kept} for row in found["engines"]}


def table_of(found: dict[str, Any]) -> Table:
    table = Table("job", "ranks", "seconds", "first", "last", "furthest apart", title="evaluated after each epoch")
    for name, entry in found.items():
        runs = entry["ranks"]
        for ranks, run in runs.items():
            first, last = (
                ", ".join(f"{metric} {value:.4f}" for metric, value in at.items() if metric != "step")
                for at in (run["curve"][0], run["curve"][-1])
            )
            apart = "" if run is not runs[next(reversed(runs))] else furthest([each["curve"] for each in runs.values()])
            table.add_row(name, ranks, f"{run['seconds']:.0f}", first, last, apart)
        table.add_section()
    return table


def furthest(curves: list[list[dict[str, float]]]) -> str:
    """By how much the numbers of ranks differ at most, anywhere on their curves, of each metric."""
    metrics = [metric for metric in curves[0][0] if metric != "step"]
    spread = {m: max(max(at[m] for at in row) - min(at[m] for at in row) for row in zip(*curves)) for m in metrics}
    return ", ".join(f"{metric} {value:.1g}" for metric, value in spread.items())


def verdicts_of(found: dict[str, Any]) -> Table:
    proven = {name: entry["engines"] for name, entry in found.items() if entry["engines"]}
    table = Table("engine", *proven, title="verify on 2 ranks: the largest difference from the reference")
    for engine in next(iter(proven.values()), {}):
        cells = []
        for rows in proven.values():
            row = rows[engine]
            apart = f" {row['max_difference']:.1e}" if row["max_difference"] else ""
            cells.append("same (bitwise)" if row["bitwise"] else row["verdict"] + apart)
        table.add_row(engine, *cells)
    return table


def figure_of(found: dict[str, Any]) -> Figure:
    columns = min(4, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(3.2 * columns, 3 * rows), layout="constrained")
    for axes, (name, entry) in zip(figure.subplots(rows, columns, squeeze=False).flat, found.items()):
        for (ranks, run), style in zip(entry["ranks"].items(), ("-", "--", ":")):
            steps, losses = zip(*((at["step"], at["loss"]) for at in run["curve"]))
            axes.plot(steps, losses, style, marker="o", label=f"{ranks} rank{'s' if ranks != '1' else ''}")
        axes.set(title=name, xlabel="step", ylabel="held-out loss")
        axes.legend()
    return figure


def write(found: dict[str, Any], out: Path) -> None:
    """What there is so far: a job takes minutes, and the next one may fail."""
    out.mkdir(parents=True, exist_ok=True)
    raw = out / "raw.json"
    before = json.loads(raw.read_text())["jobs"] if raw.exists() else {}
    found = {name: (before | found)[name] for name in SMALL if name in before | found}
    raw.write_text(json.dumps({"machine": hardware.facts("cpu"), "jobs": found}, indent=1))
    text = StringIO()
    for table in (table_of(found), verdicts_of(found)):
        Console(file=text, width=WIDTH).print(table)
    (out / "table.txt").write_text(text.getvalue())
    figure_of(found).savefig(out / "curves.png", dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(SMALL))
    parser.add_argument("--ranks", default="1,2,3")
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    for name in asked.only.split(","):
        job, place, small, tiny = SMALL[name]
        data = {"data": (asked.data / place).resolve()}
        if not data["data"].exists():
            print(f"{name} is left out: there is no {data['data']}", file=sys.stderr)
            continue
        runs = {}
        for ranks in asked.ranks.split(","):
            with tempfile.TemporaryDirectory() as folder:
                print(f"{name} on {ranks}", file=sys.stderr)
                runs[ranks] = trained(job, data | small, int(ranks), Path(folder))
        with tempfile.TemporaryDirectory() as folder:
            engines = verified(job, data | tiny, Path(folder)) if tiny else {}
        found[name] = {"settings": small, "proof_settings": tiny, "ranks": runs, "engines": engines}
        if asked.out:
            write(found, asked.out)
    for table in (table_of(found), verdicts_of(found)):
        Console(width=WIDTH).print(table)
    wrong = [row for entry in found.values() for row in entry["engines"].values() if row["verdict"] == "differs"]
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    sys.exit(main())
