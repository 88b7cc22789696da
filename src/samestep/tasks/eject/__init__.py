"""eject(job, engine): one stand-alone script without samestep, joined from the files that are proven.

The job, the engine's loop and what both stand on are the files' own lines. The run around them is runtime/, which is
copied as it stands; a test runs every script where samestep cannot be imported, and finds samestep's own weights.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from samestep import engine as engines
from samestep.errors import UserError
from samestep.tasks.eject import runtime
from samestep.tasks.eject.imports import Import, Imports, block
from samestep.tasks.eject.join import Joined, Place, settled
from samestep.tasks.eject.runtime import whole_run
from samestep.tasks.eject.runtime.run import CLOSURE, special_parts
from samestep.tasks.eject.source import Source, origin
from samestep.tasks.inspect.load import GENERAL, build_by, find, general_settings, home, values_of
from samestep.world import World

RUNTIME = runtime.__name__
STANDS_FOR: dict[Place, Place] = {
    ("samestep.job", "Job"): (f"{RUNTIME}.job", "Job"),
    ("samestep.training", "Run"): (f"{RUNTIME}.run", "Run"),
    ("samestep.world", "World"): (f"{RUNTIME}.run", "World"),
    ("samestep.rank.group", "process_group"): (f"{RUNTIME}.group", "process_group"),
    ("samestep.rank.fsdp_units", "FSDPReads"): (f"{RUNTIME}.fsdp_reads", "FSDPReads"),
    ("samestep.errors", "UserError"): (f"{RUNTIME}.errors", "UserError"),
    ("samestep.errors", "Refused"): (f"{RUNTIME}.errors", "Refused"),
    ("samestep.message", "message"): (f"{RUNTIME}.errors", "message"),
}
HEAD = '''"""{title}: one script that does not need samestep, which wrote it. Start it with

    {launch}

It trains, saves weights.pt and evaluates them, each row once. The last line holds the settings. First comes the job,
then the engine's loop, `train`, then the code that both need, each under the name of its file in samestep.{beside}
"""
'''


def eject(target: str, texts: Mapping[str, str], name: str, settings: Mapping[str, Any], size: int, file: str) -> str:
    """The script that trains the job `target` (with --set's `texts`) on an engine, on `size` ranks by its launch line.

    A job of the user's is built, to see what its script needs; where that fails, as without its data, the script has it
    all. Raises UserError for a job that no script can hold.
    """
    _check_head(file)
    _check_head(target.rpartition("/")[2])
    function, engine = find(target), engines.load(name)
    launch = _launch_lines()
    if engine.needs.processes not in launch:
        raise UserError(
            f"{name} needs processes of the kind '{engine.needs.processes}', and scripts are written for "
            f"{', '.join(launch)} alone; choose another engine"
        )
    given = _given(function, texts, target)
    job, called = home(target, function)
    of = sys.modules[engine.train.__module__]
    roots = [(job.__name__, called), (of.__name__, "train")]
    roots += [(of.__name__, "close")] if engine.close else []
    layout = engine.layout(World(size=2, devices=("cuda:0", "cuda:1")), **settings)
    parts = _parts(job, function, target, texts, given[1], size)
    _check_parts(parts or set(), name, layout, engine.needs.processes)
    whole = [(whole_run.__name__, "WholeRun")] if parts != set() else []
    start = f"{RUNTIME}.{engine.needs.processes}", "start"
    joined, beside = settled([*roots, *whole, start], job, STANDS_FOR)
    chosen = _unlike_the_defaults(engine, settings)
    if layout.lone_batchnorm:
        if given[1].get("sync_batchnorm") or given[0].get("sync_batchnorm"):
            raise UserError(f"SyncBatchNorm does not find the other ranks of {name}; leave sync_batchnorm out")
        chosen |= {"lone_batchnorm": True} if engine.needs.processes == "one" else {}
    built = f"{called}({', '.join(_arguments(given[0]))})"
    if given[1]:
        built = f"replace({', '.join([built, *_arguments(given[1])])})"
    run = ["run=WholeRun"] if whole else []
    started = ", ".join([built, *(root[1] for root in roots[1:]), *run, *_arguments(chosen)])
    extra = {"Path": Import("pathlib", "Path", "Path")} if "Path(" in started else {}
    extra |= {"replace": Import("dataclasses", "replace", "replace")} if given[1] else {}
    script = "\n".join(
        [
            HEAD.format(
                title=f"{target.rpartition('/')[2]} on {name}",
                launch=launch[engine.needs.processes].format(size=size, file=shlex.quote(file)),
                beside=f" It needs {' and '.join(beside)} beside it." if beside else "",
            ),
            block(_imports(joined) | extra),
            *(_section(joined, source) for source in joined.order()),
            f'\nif __name__ == "__main__":\n    start({started})\n',
        ]
    )
    _check_file(file, script)
    return script


def _parts(
    job: ModuleType,
    function: Any,
    target: str,
    texts: Mapping[str, str],
    general: Mapping[str, Any],
    size: int,
) -> set[str] | None:
    """Returns the special parts of a job; None where it cannot be built."""
    if job.__name__.startswith("samestep."):  # which has them by a setting alone, and its data may be large
        return {"gather_outputs"} if general.get("gather_outputs") else set()
    try:
        return special_parts(build_by(function, target, texts), size=size)
    except UserError:
        return None


def _check_parts(parts: set[str], name: str, layout: engines.Layout, kind: str) -> None:
    """Raises UserError for a job that no script trains, or none of this engine, whose processes are of this kind."""
    if absent := parts - whole_run.WholeRun.supports:
        raise UserError(f"a script cannot train a job with {' and '.join(sorted(absent))}; train it with samestep")
    of_kind: frozenset[str] = getattr(importlib.import_module(f"{RUNTIME}.{kind}"), "UNSUPPORTED", frozenset())
    if absent := parts & (of_kind if layout.closures else of_kind | {CLOSURE}):
        raise UserError(
            f"a script of {name} cannot train a job with {' and '.join(sorted(absent))}; use another engine"
        )


def _launch_lines() -> dict[str, str]:
    """The kinds of processes that runtime/ can start, each with the line that starts a script of it."""
    modules = {m.name: importlib.import_module(f"{RUNTIME}.{m.name}") for m in pkgutil.iter_modules(runtime.__path__)}
    return {name: module.LAUNCH for name, module in modules.items() if hasattr(module, "LAUNCH")}


def _given(function: Any, texts: Mapping[str, str], target: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of --set: the job function's own, and those that every job has."""
    own = inspect.signature(function).parameters
    general = {key: text for key, text in texts.items() if key not in own and key in GENERAL}
    mine = {key: text for key, text in texts.items() if key not in general}
    values = values_of(function, mine, f"the job {target}", "--set", GENERAL)
    absent = [n for n, p in own.items() if p.default is inspect.Parameter.empty and n not in values]
    if absent:
        raise UserError(f"the job {target} needs a value for '{absent[0]}': give --set {absent[0]}=…")
    return values, values_of(general_settings, general, f"the job {target}", "--set")


def _unlike_the_defaults(engine: engines.Engine, settings: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(engine.train).parameters
    return {key: value for key, value in settings.items() if value != parameters[key].default}


def _arguments(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={literal(value)}" for key, value in values.items()]


def _imports(joined: Joined) -> Imports:
    """The import lines of all sources, as one."""
    imports: Imports = {"annotations": Import("__future__", "annotations", "annotations")}
    for source in joined.order():
        imports |= joined.imports[source.name]
    return imports


def _section(joined: Joined, source: Source) -> str:
    """A part of the script: where it comes from, what its file says of itself, its lines."""
    place = source.name.replace(".", "/") + ".py" if not source.whole else source.path.name
    aliases = [f"{local} = {there}" for local, there in joined.aliases[source.name].items()]
    text = "\n".join([*aliases, source.kept(joined.kept[source.name])])
    said = f'\n"""{source.docstring}\n"""\n\n' if source.docstring else ""
    return f"\n# {'-' * 118}\n# {place}\n{said}\n{text}\n"


def literal(value: Any) -> str:
    """A setting's value as Python text. Raises UserError for one that has none."""
    if isinstance(value, float) and repr(value).strip("-") in ("inf", "nan"):
        return f'float("{value}")'
    if isinstance(value, Path):
        return f"Path({literal(str(value))})"
    if type(value) is str:
        return repr(value) if {'"', "\\"} & set(value) or not value.isprintable() else f'"{value}"'
    if isinstance(value, list | tuple):
        inner = ", ".join(map(literal, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(of)}" for key, of in value.items()) + "}"
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    raise UserError(
        f"a script cannot hold the setting {value!r}, a {type(value).__name__}; let the job take a number or a text"
    )


def _check_head(name: str) -> None:
    """Raises UserError for a name that would end the docstring at the script's head."""
    if '"' in name or "\\" in name or not name.isprintable():
        raise UserError(f"the script's head cannot hold the name {name!r}; give one without quotes and line breaks")


def _check_file(file: str, script: str) -> None:
    """Raises UserError for a file's name that would hide a module from the script, which Python looks for beside it."""
    stem = Path(file).stem
    imported = {
        module.partition(".")[0]
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }
    installed = "site-packages" in str(origin(stem))  # the job may import it when it runs
    if stem in imported | sys.stdlib_module_names or installed:
        raise UserError(f"Python would import {file} as the package {stem}; give the script another name with --to")
