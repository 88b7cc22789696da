"""How fast does samestep feed a step, against torch's DataLoader as tutorials write it? And does a training wait?

    python benchmarks/input.py [--images FOLDER] [--rounds N] [--out results/NAME]

Loading: batches of 64 rows a rank, from memory (a TensorDataset of rows of 256 bytes, 3 KiB and 12 KiB) and, with
--images, from folders of JPEGs, one for each class: decoded, padded by 4, cropped, flipped, normalised. The
DataLoader's arm does that sample by sample and collates; its workers are kept between epochs. Ours fetches and crops
bytes, and normalises a batch at once where a model would, which its time includes. With 1 rank, and with 2 that each
load their half; the number of workers is the same in both arms (a TensorDataset makes ours start none). The arms take
turns in blocks within one process a rank, in an order that changes; a block's first batches, which are ready from its
pause, are not timed. On 2 ranks a block takes as long as on the slower one. `control` is the DataLoader once more.

Training (with --images): a conv net in one process with loader workers. `ceiling` is what these workers load when
nothing trains, `demand` what the net would train on if it never waited, `waits` the share of the time that it did.

Prints rows per second, and ours over theirs: the median over the rounds with a 95 % bootstrap interval; goals: at
least 5 from memory, 1.3 from JPEGs, and waiting below 2 % wherever the ceiling is 1.3 times the demand or more.
--out writes raw.json (every block, the machine, the versions) and table.txt. Exit code 0 whatever the verdicts are, 1
when an arm failed or the deadline passed (every thread's stack is printed first).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import ProcessException, spawn

import feeds
from overhead import compare

GOALS = {"memory": 5.0, "jpeg": 1.3}
BLOCK = {"memory": 200, "jpeg": 30}  # batches
WAIT_GOAL, ROOM = 0.02, 1.3  # the share that may be waited where the ceiling is so many times the demand
WIDTHS = (8, 32, 64)  # of the trained net
STEPS = 150


def launched(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank of one launch found."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(feeds.rank_main, (asked, folder), nprocs=asked["ranks"])
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(asked["ranks"])]


def slowest(launches: list[list[dict[str, Any]]], name: str) -> NDArray[np.float64]:
    """Seconds of each block of an arm on the rank that took longest. shape [launches, rounds]"""
    return np.array([np.max([rank["seconds"][name] for rank in ranks], axis=0) for ranks in launches])


def judged(launches: list[list[dict[str, Any]]], ranks: int, block: int, goal: float) -> dict[str, Any]:
    times = {name: slowest(launches, name) for name in feeds.ARMS}
    rows = feeds.BATCH * block * ranks
    return {
        "rows_per_s": {name: float(np.median(rows / of_arm)) for name, of_arm in times.items()},
        "ours": asdict(compare(times["samestep"], times["dataloader"], goal)),
        "control": asdict(compare(times["control"], times["dataloader"], 1.0)),
        "goal": goal,
    }


def loading(asked: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Every source with 1 and 2 ranks, without workers and with as many as there are cores."""
    table = Table("source", "ranks", "workers", "samestep, rows/s", "DataLoader", "ours / theirs", "control", "goal")
    cases = []
    for source in (name for name in feeds.sources(asked.images) if asked.only in name):
        kind = source.partition(" ")[0].strip(",")
        for ranks in asked.ranks or (1, 2):
            for workers in (0, max(1, (os.cpu_count() or 1) // ranks)):
                block = asked.block or BLOCK[kind]
                case = {"what": "load", "source": source, "ranks": ranks, "workers": workers, "block": block}
                settings = case | {"rounds": asked.rounds, "images": asked.images, "deadline_s": asked.deadline}
                launches = [launched(settings) for _ in range(asked.launches)]
                found = judged(launches, ranks, block, GOALS[kind])
                cases.append(case | found | {"launches": launches})
                ours, control = found["ours"], found["control"]
                table.add_row(
                    source, str(ranks), str(workers),
                    *(f"{found['rows_per_s'][name]:,.0f}" for name in ("samestep", "dataloader")),
                    "{:.2f} ({:.2f} to {:.2f})".format(*ours["ratio"]), f"{control['ratio'][0]:.2f}",
                    f"≥ {found['goal']}: {ours['verdict']}",
                )  # fmt: skip
    console.print(table)
    return cases


def training(asked: argparse.Namespace, cases: list[dict[str, Any]], console: Console) -> list[dict[str, Any]]:
    """Nets that want more and less than one worker loads."""
    table = Table("net", "workers", "ceiling, rows/s", "demand", "ceiling / demand", "waits", "goal")
    found = []
    for width in asked.width or WIDTHS:
        settings = {"what": "train", "ranks": 1, "workers": 1, "width": width, "steps": asked.steps}
        (rank,) = launched(settings | {"images": asked.images, "deadline_s": asked.deadline})
        alone = launched(
            {"what": "load", "source": "jpeg folders", "ranks": 1, "workers": 1, "rounds": 2, "images": asked.images}
            | {"block": asked.block or BLOCK["jpeg"], "deadline_s": asked.deadline}
        )
        ceiling = feeds.BATCH * (asked.block or BLOCK["jpeg"]) / float(np.median(alone[0]["seconds"]["samestep"]))
        seen = rank["training"] | {"ceiling": ceiling}
        found.append(seen)
        room, waits = ceiling / seen["demand"], seen["wait_share"]
        verdict = "none: too little is loaded" if room < ROOM else "met" if waits < WAIT_GOAL else "not met"
        cells = [f"{ceiling:,.0f}", f"{seen['demand']:,.0f}", f"{room:.2f}", f"{waits:.1%}", f"< 2 %: {verdict}"]
        table.add_row(f"width {width}", "1", *cells)
    console.print(table)
    for seen in found:
        if seen["advice"]:
            console.print(f"width {seen['width']}: {seen['advice']}", highlight=False)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="one folder of JPEGs for each class")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the sources, those with TEXT in their name")
    parser.add_argument("--ranks", type=int, action="append", choices=(1, 2), help="default: 1 and 2")
    parser.add_argument("--rounds", type=int, default=8, help="of each launch")
    parser.add_argument("--launches", type=int, default=2)
    parser.add_argument("--block", type=int, help=f"batches an arm loads in its turn, default: {BLOCK}")
    parser.add_argument("--width", type=int, action="append", help=f"of the trained nets, default: {WIDTHS}")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training")
    parser.add_argument("--deadline", type=float, default=300, metavar="S", help="seconds for one launch")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    asked = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    said = StringIO()
    console = Console(width=120, file=said)
    began = time.monotonic()
    try:
        cases = loading(asked, console)
        trainings = training(asked, cases, console) if asked.images else []
    except ProcessException as error:
        print(error, file=sys.stderr)
        return 1
    on = cases[0]["launches"][0][0]["machine"]
    console.print(f"{on['cores']} cores, torch {on['versions']['torch']}, {time.monotonic() - began:.0f} s")
    print(said.getvalue())
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "raw.json").write_text(json.dumps({"loading": cases, "training": trainings}))
        (asked.out / "table.txt").write_text(said.getvalue())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
