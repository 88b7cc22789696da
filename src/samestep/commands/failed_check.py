"""Names the lines of the user's script at which a check has failed."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from samestep.commands.user_sources import read_sources
from samestep.errors import UserError
from samestep.judge.failures import lines_of
from samestep.launch import stacks
from samestep.message import Message, message
from samestep.records.call_site import CallRecord, CallSite
from samestep.records.files import read
from samestep.records.record import RankError
from samestep.records.script import UNFINISHED, ScriptRecord
from samestep.records.script_plan import PLAN, ScriptPlan
from samestep.world.imports import is_users_code
from samestep.world.regular_files import read_regular

FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)$', re.MULTILINE)  # a frame of a traceback
SECTIONS = re.compile(r"^(?:The above exception was|During handling of the above) .*$", re.MULTILINE)


def with_lines(why: Message, folder: Path, nproc: int) -> Message:
    """Returns why a check has failed, and the lines of the user's script to look at where some are known."""
    calls, places = list[CallRecord](), list[CallSite]()
    for rank in range(nproc):
        site = _site_of(folder, rank)
        places += [site] if site else []
        for name in (UNFINISHED.format(rank), f"rank{rank}.json"):
            with suppress(OSError, ValueError, UserError):
                calls += read(ScriptRecord, folder / name).calls
    if why.id == "rank_received_data_of_another_size":
        # The process that aborts records nothing: its stack alone says which collective it was in.
        calls += [CallRecord("collective", "", [site]) for site in places]
    plan = read(ScriptPlan, folder / PLAN)
    files = {site.file for record in calls for site in record.sites} | {site.file for site in places}
    if plan.script and not plan.module:
        files.add(str(Path(plan.script).absolute()))
    sites = lines_of(why, calls, places, read_sources(sorted(files)))
    if not sites:
        return why
    lines = [f"{Path(site.file).name}:{site.line}" + (f" `{site.code}`" if site.code else "") for site in sites]
    return message("failure_with_lines", why=why, lines=", ".join(lines))


def _site_of(folder: Path, rank: int) -> CallSite | None:
    """Returns the innermost line of the user's code at which a rank failed; None where that is not known."""
    with suppress(OSError, ValueError, UserError):
        return innermost(read(RankError, folder / f"error-rank{rank}.json").traceback)
    with suppress(OSError):
        threads = stacks.parse(read_regular(folder / f"stack-rank{rank}.txt").decode(errors="replace"))
        frame = next(filter(None, map(stacks.users_frame, threads)), None)
        return CallSite(frame.file, frame.line, frame.function) if frame else None
    return None


def innermost(traceback: str) -> CallSite | None:
    """Returns the innermost line of the user's code in a traceback, of the last exception that passed through some."""
    for section in reversed(SECTIONS.split(traceback)):
        frames = [frame for frame in FRAME.findall(section) if is_users_code(frame[0])]
        if frames:
            file, line, function = frames[-1]
            return CallSite(file, int(line), function)
    return None
