"""eject(job, engine): a script without samestep: the engine's loop, the job's own files, and one runtime module.

The script holds the engine's `train` as it is proven, and imports the job's file as it is. What both need of samestep
stands in the runtime module: samestep's own lines, and the run of runtime/ in the place of samestep's. A test runs
every script where samestep cannot be imported, and finds samestep's own weights.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep import engine as engines
from samestep.errors import UserError
from samestep.job import Job
from samestep.message import message
from samestep.records.inspection import Script
from samestep.tasks.eject import runtime
from samestep.tasks.eject.divided import Divided
from samestep.tasks.eject.job_files import JobFiles, origin
from samestep.tasks.eject.join import Joined, Place
from samestep.tasks.eject.runtime.job import CLOSURE, special_parts, untrained_parts
from samestep.tasks.eject.script import Call, head_of, runtime_text, script_text, unlike_the_defaults
from samestep.tasks.eject.source import is_ours
from samestep.tasks.inspect.load import GENERAL, build_by, find, general_settings, home, innermost, values_of
from samestep.world import World
from samestep.world.mesh import Mesh

RUNTIME = runtime.__name__
# Engines with a checkpoint of another kind than one state dict of the model and one of the optimizer.
NOT_SAVED = {"deepspeed"}
ON_MESHES = {"tensor", "fsdp", "pipeline"}  # those of which a script knows how the ranks divide the model
# What a job's file may import, so that it can be changed and the runtime module stays.
OF_JOBS = ("Batch", "ByLength", "Job", "LRSchedule", "Lanes", "Recipe", "StepInfo", "UserError", "Weighted")


def eject(
    target: str,
    texts: Mapping[str, str],
    name: str,
    settings: Mapping[str, Any],
    size: int,
    file: str,
    mesh: Mesh | None = None,
) -> Script:
    """Returns the script that trains the job `target` (with --set's `texts`) on an engine, and the files beside it.

    size: the ranks of its launch line. mesh: how they are arranged; None: each is a replica. The job is built, to see
    whether a script can train it, unless its data are not here. Raises UserError for a job that cannot be built for
    another reason, or that no script can train.
    """
    _check_head(file)
    _check_head(target.rpartition("/")[2])
    function, engine = find(target), engines.load(name)
    launch = _launch_lines()
    kind = engine.needs.processes
    mesh = _checked_mesh(name, engine, mesh, settings, launch)
    given, general = _given(function, texts, target)
    module, called = home(target, function)
    files = JobFiles(module)
    world = World(size=mesh.size, mesh=mesh) if mesh else World(size=2, devices=("cuda:0", "cuda:1"))
    layout = engine.layout(world, **settings)
    # How ranks divide the model is tried on the job; else a script is written without it.
    if mesh and (mesh.tensor > 1 or name == "pipeline"):
        job: Job | None = build_by(function, target, texts)
    else:
        job = _built(function, target, texts, is_own=not is_ours(module.__name__))
    if job is not None:
        _check_parts(job, name, layout, kind, size=size, mesh=mesh)
    if layout.lone_batchnorm and (general.get("sync_batchnorm") or given.get("sync_batchnorm")):
        raise UserError(message("script_batchnorm_finds_no_ranks", engine=name))
    divided = Divided.by_trial(job, mesh, engine, settings) if mesh else None
    # The ranks divide the model of this job, and may not divide that of another one.
    options = {} if mesh else _settable(function, given)
    is_saved = name not in NOT_SAVED and mesh is None and not (job and special_parts(job))
    call = Call(
        files.name,
        called,
        {name: value for name, value in given.items() if name not in options},
        options=options,
        general=general,
        settings=unlike_the_defaults(engine, settings),
        start=_start_arguments(engine, mesh, layout),
        # Scripts that lie in one folder have checkpoints of their own.
        checkpoint=f"{Path(file).stem}.checkpoint.pt" if is_saved else "",
        is_ray=kind == "ray",
    )
    joined = _joined(engine, kind, files, has_mesh=mesh is not None)
    beside = re.sub(r"\W", "_", f"samestep_{name}")
    head = head_of(
        f"{target.rpartition('/')[2]} on {name}",
        launch[kind],
        size,
        file,
        beside=[f"{beside}.py", *files.relative()],
        more=" It continues from the checkpoint of an epoch." if is_saved else "",
    )
    meant = sorted({"samestep", *(module for module, _ in files.uses)})
    script = script_text(joined, call, head, runtime=beside, meant=meant)
    script = divided.written(script) if divided else script
    made = {file: script, f"{beside}.py": runtime_text(joined, name)}
    copied = {path: str(source) for path, source in files.relative().items()}
    _check_names(file, beside, [*copied], made)
    return Script(made, copied, str(files.root))


def _checked_mesh(
    name: str, engine: engines.Engine, mesh: Mesh | None, settings: Mapping[str, Any], launch: Mapping[str, str]
) -> Mesh | None:
    """Returns the mesh that a script is written for. Raises UserError for an engine, a mesh or settings of which there
    is none."""
    kind = engine.needs.processes
    if kind not in launch:
        raise UserError(message("script_cannot_start_processes", engine=name, processes=kind, known=[*launch]))
    if engine.divides_model and name not in ON_MESHES:
        raise UserError(message("script_cannot_divide_the_model", engine=name))
    axes = () if kind == "one" else engine.axes
    if unfit := [axis for axis in (mesh.sizes if mesh else ()) if axis not in axes]:
        raise UserError(message("engine_does_not_take_axis", engine=name, axis=unfit[0], axes=axes))
    for setting in ("sequence_parallel", "loss_parallel", "offload"):
        if settings.get(setting):
            raise UserError(message("script_lacks_engine_setting", engine=name, setting=setting))
    return mesh if name in ON_MESHES else None  # else all ranks are along `data`, as without one


def _start_arguments(engine: engines.Engine, mesh: Mesh | None, layout: engines.Layout) -> dict[str, str]:
    """Returns what the start of a script is given besides the job and the loop, as text."""
    arguments = {}
    if engine.close:
        arguments["close"] = "close"
    if mesh:
        arguments["mesh"] = f"Mesh({', '.join(f'{axis}={count}' for axis, count in mesh.sizes.items())})"
    if layout.micro_batches > 1:
        arguments["micro_batches"] = str(layout.micro_batches)
    if layout.lone_batchnorm:
        arguments["lone_batchnorm"] = "True"
    return arguments


def _joined(engine: engines.Engine, kind: str, files: JobFiles, *, has_mesh: bool) -> Joined:
    """Returns what a script and its runtime module need: of the engine's loop, of the start, and of the job."""
    loop = sys.modules[engine.train.__module__].__name__
    if any(module == loop for module, _ in files.uses):
        raise UserError(message("script_holds_the_loop", module=loop))
    in_script = [loop, *(f"{RUNTIME}.{file}" for file in runtime.IN_SCRIPT)]
    roots: list[Place] = [(loop, "train"), *([(loop, "close")] if engine.close else [])]
    roots += [("samestep", name) for name in OF_JOBS]
    roots += sorted(files.uses)
    roots += [("samestep.world.mesh", "Mesh")] if has_mesh else []
    roots += [(f"{RUNTIME}.{kind}", "start")]
    stand_ins = {name: f"{RUNTIME}.{file}" for name, file in runtime.STAND_INS.items()}
    return Joined(roots, stand_ins, in_script)


def _built(function: Any, target: str, texts: Mapping[str, str], *, is_own: bool) -> Job | None:
    """Returns the job; None where its data are not here. is_own: it is no built-in job. Raises UserError where its
    function fails otherwise: so would the script."""
    try:
        return build_by(function, target, texts)
    except UserError as error:
        if is_own and not _lacks_a_file(error):
            raise
        return None


def _lacks_a_file(error: BaseException) -> bool:
    """Whether an error, or one that it was raised for, is of a file, a folder or a server that is not there."""
    inner = error.__cause__ or error.__context__
    return isinstance(error, OSError) or (inner is not None and _lacks_a_file(inner))


def _check_parts(job: Job, name: str, layout: engines.Layout, kind: str, *, size: int, mesh: Mesh | None) -> None:
    """Raises UserError for a job that no script trains, or none of this engine, whose processes are of this kind."""
    if absent := untrained_parts(job):
        raise UserError(message("script_cannot_train_parts", parts=absent))
    of_kind: frozenset[str] = getattr(importlib.import_module(f"{RUNTIME}.{kind}"), "UNSUPPORTED", frozenset())
    of_kind |= {"gather_outputs"} if mesh else frozenset()
    of_kind |= frozenset() if layout.closures else {CLOSURE}
    of_kind -= frozenset() if size > 1 else {"gather_outputs"}
    if absent := special_parts(job) & of_kind:
        raise UserError(message("script_of_engine_cannot_train_parts", engine=name, parts=absent))


def _launch_lines() -> dict[str, str]:
    """Returns the kinds of processes that runtime/ can start, each with the line that starts a script of it."""
    modules = {m.name: importlib.import_module(f"{RUNTIME}.{m.name}") for m in pkgutil.iter_modules(runtime.__path__)}
    return {name: module.LAUNCH for name, module in modules.items() if hasattr(module, "LAUNCH")}


def _given(function: Any, texts: Mapping[str, str], target: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values of --set: the job function's own, and those that every job has."""
    parameters = inspect.signature(function).parameters
    general = {key: text for key, text in texts.items() if key not in parameters and key in GENERAL}
    specific = {key: text for key, text in texts.items() if key not in general}
    the_job = message("the_job", job=target)
    values = values_of(function, specific, the_job, "--set", GENERAL)
    absent = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in values]
    if absent:
        raise UserError(message("job_needs_a_setting", job=target, name=absent[0]))
    return values, values_of(general_settings, general, the_job, "--set")


def _settable(function: Any, given: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Returns the job's settings that a command line can give: name -> the type's name, and the default. given: the
    values of --set, which are the script's defaults."""
    from typing import get_type_hints

    hints = get_type_hints(innermost(function))
    settings: dict[str, tuple[str, Any]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        default = given.get(name, parameter.default)
        kind = hints.get(name, type(default))
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and kind in (int, float, str):
            settings[name] = kind.__name__, default
    return settings


def _check_head(name: str) -> None:
    """Raises UserError for a name that would end the docstring at the script's head."""
    if '"' in name or "\\" in name or not name.isprintable():
        raise UserError(message("script_head_cannot_hold_name", name=repr(name)))


def _check_names(file: str, runtime: str, copied: list[str], made: Mapping[str, str]) -> None:
    """Raises UserError for a file that would hide a module, which Python looks for beside the script."""
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", "\n".join(made.values()), re.MULTILINE))
    imported -= {runtime, *(Path(path).parts[0].removesuffix(".py") for path in copied)}
    stem = Path(file).stem
    if stem in imported | sys.stdlib_module_names or "site-packages" in str(origin(stem)):  # the job may import it
        raise UserError(message("script_hides_a_package", file=file, package=stem))
    if f"{runtime}.py" in copied:
        raise UserError(message("script_needs_name_of_job_file", file=f"{runtime}.py"))
    first_parts = {Path(path).parts[0].removesuffix(".py") for path in copied}
    if file == f"{runtime}.py" or stem in first_parts:
        raise UserError(message("script_needs_name_of_another_file", file=file))
    for first in first_parts:
        if first in sys.stdlib_module_names:
            raise UserError(message("job_file_hides_a_module", module=first))
