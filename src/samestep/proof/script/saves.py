"""Whether several ranks write one file."""

from __future__ import annotations

from collections import defaultdict
from pathlib import PurePath

from samestep.proof.script.updates import Ranks, many
from samestep.records.script import Finding

QUESTION = "saves"
SHARED = (
    "ranks {} write the same file {} (from step {} on): what is in it afterwards is one rank's, or parts of several. "
    "Let rank 0 save what all have, under `if rank == 0`; a state of each rank's own needs a file of its own"
)


def saves(ranks: Ranks) -> Finding:
    """Answers whether each file that torch.save writes is written by one rank."""
    writers: dict[str, dict[int, int]] = defaultdict(dict)  # file -> rank -> the step
    for number, rank in enumerate(ranks):
        for each in rank.saves:
            writers[each.file][number] = each.step
    shared = {file: of for file, of in writers.items() if len(of) > 1}
    if not shared:
        said = f"{many(len(writers), 'file')}, each by one rank" if writers else "torch.save wrote no file"
        return Finding(QUESTION, "right", said)
    file, of = min(shared.items(), key=lambda each: min(each[1].values()))
    return Finding(QUESTION, "warning", SHARED.format(", ".join(map(str, of)), PurePath(file).name, min(of.values())))
