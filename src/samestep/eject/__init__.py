"""eject(job, engine): one stand-alone script without samestep, made from the files that are proven.

The engine's loop is its file's own text, with what this job and these settings do not use left out. The schedule and
the main around it are a template; a test runs every ejected script and finds the reference's losses.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from samestep import engine as engines
from samestep.data.schedule import schedule_of
from samestep.eject.source import Specialised, imports_of, merged, used_names, without_imports
from samestep.errors import UserError
from samestep.loading import build, find, values_of

SUPPORT = """
import hashlib
import os
import sys
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate
"""
LAUNCH = {
    "process": "python {file}",
    "torchrun": "python -m torch.distributed.run --nproc-per-node={size} {file}",
    "horovodrun": "horovodrun -np {size} python {file}",
}
DEFAULTS = {"collate": "None", "epochs": "1", "seed": "0", "clip_norm": "None", "evaluation": "None"}


def eject(target: str, texts: Mapping[str, str], name: str, settings: Mapping[str, Any], size: int, file: str) -> str:
    """The script that trains the job `target` (with --set's `texts`) on an engine, on `size` ranks by its launch line.

    Raises UserError for a job that cannot be built.
    """
    job, function, engine = build(target, texts), find(target), engines.load(name)
    if Path(file).stem in engine.NEEDS:
        raise UserError(f"{file} would hide the package {Path(file).stem} from itself; give another name with --to")
    loop = Specialised(engine, job, settings, schedule_of(job, size).micro_batches)
    job_source = Path(inspect.getfile(function)).read_text()
    values = values_of(function, texts, f"the job {target}", "--set")
    launcher = engine.LAUNCHERS[0]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("samestep.eject", "."), keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    weight = "float(sum(map(job.weight, {0})))" if job.weight else "len({0})"
    engine_text = loop.text()
    facts = {
        "title": f"{target.rpartition('/')[2]} on {name}",
        "launch_line": LAUNCH[launcher].format(size=size, file=file),
        "defaults": {
            key: value for key, value in DEFAULTS.items() if f"job.{key}" in engine_text or key in ("epochs", "seed")
        },
        "scheduler": job.scheduler is not None,
        "by_epoch": job.scheduler is not None and job.scheduler.every == "epoch",
        "augment": job.augment is not None,
        "collate": job.collate is not None,
        "drops": job.last == "drop",
        "weight_of": weight.format,
        "micro_batches": loop.micro_batches,
        "job": without_imports(job_source),
        "source": f"samestep/engines/{name}.py",
        "engine": engine_text,
        "launcher": launcher,
        "prefix": "HOROVOD_" if launcher == "horovodrun" else "",
        "size_name": "SIZE" if launcher == "horovodrun" else "WORLD_SIZE",
        "local_size": "world.local_size" in engine_text,
        "group": launcher == "torchrun",
        "closes": hasattr(engine, "close"),
        "function": function.__name__,
        "arguments": ", ".join(f"{key}={_literal(value)}" for key, value in values.items()),
    }
    template = environment.get_template("script.py.j2")
    body = template.render(facts, imports="")
    wanted = [imports_of(text) for text in (SUPPORT, job_source, inspect.getsource(engine))]  # type: ignore[arg-type]
    return template.render(facts, imports=merged(wanted, used_names(body)))


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, Path) else repr(value)
