"""One launch of a training or an evaluation, from a command's options to what it came to."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from samestep.commands import setup
from samestep.commands.progress import Training
from samestep.commands.train import prepare, train
from samestep.errors import say
from samestep.launch.command import shell_line
from samestep.report.figures import batch_size


def conduct(
    command: str, asked: Mapping[str, Any], step_of: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any] | None:
    """Launches once. asked: the command's options. step_of: of what the inspection found, the plan's training or
    evaluation. Returns what it came to; None on a machine or a rank where rank 0 is not, and after a dry run."""
    inside = setup.started_already(os.environ, asked)
    study, found = setup.study_of(asked["job"], asked["settings"], asked, inside)
    step = step_of(found)
    scored = step["init_sha256"] if command == "evaluate" else None
    results_in = setup.folder_of(command, study, found, asked["out"], inside, scored)
    folder = setup.launch_folder(results_in, study, inside)
    row, plan = prepare(study, found, step, results_in, folder, inside)
    if asked["dry_run"]:
        print(shell_line(plan))
        return None
    first = inside is None or inside.rank == 0
    if command == "run" and first:
        ranks = row.facts["layout"]["replicas"]
        parts = found["job"]["micro_batches"].get(str(ranks), 1)
        say(batch_size.one_step(found["job"]["global_batch"], ranks, parts))
        advice = batch_size.advice(found["job"]["settings"], found["job"]["chosen"], found["job"]["optimizer"])
        if advice:
            say(advice)
    with Training(f"{asked['job']} on {asked['engines']}", folder, first=first) as progress:
        results = train(study, found, row, plan, results_in, folder, progress.tell, alone=inside is not None)
    if results is None and inside is None:
        say(f"this machine's ranks have ended well; their logs are in {folder}, the results where rank 0 is")
    return results
