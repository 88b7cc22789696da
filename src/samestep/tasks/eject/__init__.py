"""eject(job, engine): one stand-alone script without samestep, made from the files that are proven.

The engine's loop is its file's own text, with what this job and these settings do not use left out. The schedule and
the main around it are a template; a test runs every ejected script and finds the reference's losses.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2

from samestep import engine as engines
from samestep.data.schedule import schedule_of
from samestep.errors import UserError
from samestep.job import Job
from samestep.tasks.eject.imports import Imports, block, imports_in
from samestep.tasks.eject.job_text import JobText
from samestep.tasks.eject.literal import literal
from samestep.tasks.eject.loop import Loop
from samestep.tasks.eject.names import bound, check, check_once, used
from samestep.tasks.inspect.load import build, find, home, values_of
from samestep.world import World

SUPPORT = """
from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate
"""
LAUNCH = {
    "one": "python {file}",
    "group": "python -m torch.distributed.run --nproc-per-node={size} {file}",
    "horovod": "horovodrun -np {size} python {file}",
}


def eject(target: str, texts: Mapping[str, str], name: str, settings: Mapping[str, Any], size: int, file: str) -> str:
    """The script that trains the job `target` (with --set's `texts`) on an engine, on `size` ranks by its launch line.

    Raises UserError for a job that cannot be built, and for one that the script would not train as it is.
    """
    job, function, engine = build(target, texts), find(target), engines.load(name)
    size = 1 if engine.PROCESSES == "one" else size
    what = f"{target.rpartition('/')[2]} on {name}"
    if job.sync_batchnorm and engine.layout(World(size=size), **settings).lone_batchnorm:
        raise UserError(f"SyncBatchNorm does not find the other ranks of {name}; leave sync_batchnorm out")
    loop = Loop(engine, job, settings, schedule_of(job, size).micro_batches)
    module, called = home(target, function)
    part = JobText(Path(inspect.getfile(module)), called)
    values = values_of(function, texts, f"the job {target}", "--set")
    facts = {
        "title": what,
        "launch_line": LAUNCH[engine.PROCESSES].format(size=size, file=file),
        "size": size,
        "source": f"samestep/engines/{name}.py",
        "engine": loop.text(),
        "processes": engine.PROCESSES,
        "closes": hasattr(engine, "close"),
        "function": called,
        "arguments": ", ".join(f"{key}={literal(value)}" for key, value in values.items()),
        "syncs": job.sync_batchnorm and size > 1,
        **_of_job(job, part.mentions(), loop.micro_batches),
    }
    around = {"job": "", "imports": "", "function": "main"}  # no job, of whose names none must stand in it
    frame = _render({**facts, **around}, fields=[])
    check_once(frame, what)
    imports = imports_in(ast.parse(SUPPORT).body) | imports_in(ast.parse(loop.source).body)
    asked = set(re.findall(r"\bjob\.(\w+)", frame)) | part.mentions()
    fields = _fields(set(Job.__annotations__) if part.fills_by_place() else asked)
    frame = _render({**facts, **around}, fields=fields)
    needed = used(frame) | {"annotations"}
    imports = {key: line for key, line in imports.items() if line.bound.partition(".")[0] in needed}
    part.without(lambda names: _taken(names, module, imports, frame))
    script = _render(facts, fields=fields, job=part.text(), imports=block(part.imports | imports))
    check(script, part.source, what)
    _check_file(file, script)
    return script


def _render(facts: Mapping[str, Any], **rest: Any) -> str:
    loader = jinja2.PackageLoader("samestep.tasks.eject", ".")
    environment = jinja2.Environment(loader=loader, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("script.py.j2").render(facts, **rest)


def _of_job(job: Job, mentions: set[str], micro_batches: int) -> dict[str, Any]:
    """What the template asks about a job. mentions: of its text, whose Batch has no more than it uses."""
    weight_of = "float(sum(map(job.weight, {0})))" if job.weight else "len({0})"
    last = f"micro == {micro_batches - 1}" if micro_batches > 1 else "True"
    final = "start + size >= len(order)" + (" - size + 1" if job.last == "drop" else "")
    batch = {name: name for name in ("data", "step", "micro", "share")}
    if micro_batches > 1 or "completes_step" in mentions:
        batch["completes_step"] = last
    if (job.scheduler and job.scheduler.every == "epoch") or "completes_epoch" in mentions:
        batch["completes_epoch"] = f"{last} and {final}" if micro_batches > 1 else final
    of_part = {
        "epoch": "epoch",
        "indices": "np.array(rows or (whole * 2)[:2])",
        "rows": "len(rows)",
        "weight": f"float({weight_of.format('rows')})",
    }
    return {
        "batch": batch | {name: text for name, text in of_part.items() if {"part", name} <= mentions},
        "part": "part" in mentions,
        "schedules": job.scheduler is not None or "LRSchedule" in mentions,
        "augment": job.augment is not None,
        "collate": job.collate is not None,
        "drops": job.last == "drop",
        "shuffles": job.shuffle,
        "weight_of": weight_of.format,
        "micro_batches": micro_batches,
        "micro_batch": job.micro_batch,
    }


def _fields(asked: set[str]) -> list[str]:
    """The lines of the script's Job: samestep's own fields in their order, those that have a use."""
    lines = []
    for each in dataclasses.fields(Job):
        if each.default_factory is not dataclasses.MISSING:
            default = f" = field(default_factory={each.default_factory.__name__})"  # type: ignore[attr-defined]
        elif each.name == "forward":
            default = " = lambda model, batch: model(batch.inputs)"
        else:
            default = "" if each.default is dataclasses.MISSING else f" = {literal(each.default)}"
        if not default or each.name in asked:
            lines.append(f"{each.name}: Any{default}")
    return lines


def _taken(names: set[str], module: ModuleType, imports: Imports, frame: str) -> set[str]:
    """Those of the job's names that the rest of the script has for something else."""
    objects: dict[str, Any] = dict(vars(builtins))
    exec(block(imports), objects)
    same = {name for name in names & objects.keys() if vars(module).get(name, objects[name]) is objects[name]}
    return names & (bound(frame) | used(frame)) - same


def _check_file(file: str, script: str) -> None:
    """Raises UserError for a file's name that would hide a module from the script, which Python looks for beside it."""
    stem = Path(file).stem
    imported = {
        module.partition(".")[0]
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }
    loaded = "site-packages" in str(getattr(sys.modules.get(stem), "__file__", ""))
    if stem in imported | sys.stdlib_module_names or loaded:
        raise UserError(f"{file} would hide the package {stem} from itself; give another name with --to")
