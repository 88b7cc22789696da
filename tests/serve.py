"""A rank that stays: reads the path of a plan from each line of its stdin, works on it, writes its record.

Starting a rank costs seconds and proving a small job a fraction of one; tests that prove hundreds keep their ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch

from samestep import worker
from samestep.lifeline import die_with_parent
from samestep.process_group import process_group
from samestep.record import SCHEMA, write_json
from samestep.world import World


def main() -> None:
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    world = World.from_env(os.environ)
    with process_group(world):
        for line in sys.stdin:
            plan = json.loads(Path(line.strip()).read_text())
            folder = Path(plan["out"])
            try:
                done = worker.play_reference(plan, world) if "layouts" in plan else worker.work(plan, world)
                record = {"schema": SCHEMA, "rank": world.rank, "world": asdict(world)} | done
                write_json(folder / f"rank{world.rank}.json", record)
            except BaseException as error:
                said = {"rank": world.rank, "kind": "crash", "time": time.time(), "traceback": traceback.format_exc()}
                said |= {"message": f"{error!r}", "lost_peer": worker.says_lost(error)}
                write_json(folder / f"error-rank{world.rank}.json", said)
                break
    os._exit(0)


if __name__ == "__main__":
    main()
