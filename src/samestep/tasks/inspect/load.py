"""Loads a job: finds its function, and converts the texts of --set to the types that the function declares."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import math
import pkgutil
import symtable
import sys
import tokenize
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from samestep.errors import UserError, nearest_name
from samestep.job import Job
from samestep.job.walk import uncompiled, without_wrappers
from samestep.message import Message, message
from samestep.world.connections import check_private
from samestep.world.foreign_code import as_exceptions, error_line
from samestep.world.imports import hiding_files


def builtin_names() -> list[str]:
    """Returns the names of the built-in jobs: the files in jobs/."""
    import samestep.jobs

    return sorted(m.name for m in pkgutil.iter_modules(samestep.jobs.__path__) if not m.ispkg)


def find(target: str) -> Callable[..., Any]:
    """Returns the job function that `target` names.

    target: a built-in name, `file.py[:function]`, `package.module:function`, or a pickle from the Python API (job.pkl).
    Raises UserError when there is none.
    """
    if target.endswith(".pkl"):
        return _unpickled(target)
    source, function = _split(target)
    if source is None:
        raise UserError(message("no_such_job", job=target, hint=nearest_name(target, builtin_names())))
    value = getattr(_import(source, function), function, None)
    if not callable(value):
        raise UserError(message("job_is_no_function", file=source, function=function, type=type(value).__name__))
    return value  # type: ignore[no-any-return]


def _unpickled(target: str) -> Callable[..., Any]:
    """Loads a function that samestep.commands.api has pickled, in a folder of this user alone, because no file holds
    it. Raises UserError for another file."""
    import cloudpickle

    try:
        check_private(Path(target).parent)
    except (UserError, OSError):
        raise UserError(message("job_is_a_pickle", file=target)) from None
    try:
        path, pickled = cloudpickle.loads(Path(target).read_bytes())
        sys.path += [folder for folder in path if folder not in sys.path]  # the function may need modules from there
        function = cloudpickle.loads(pickled)
    except Exception as error:
        raise UserError(message("job_does_not_load_in_another_process", error=error_line(error))) from error
    return cast(Callable[..., Any], function)


def home(target: str, function: Callable[..., Any]) -> tuple[ModuleType, str]:
    """Returns the module that holds the function find(target), and its name there.

    That is the module that defines it, if it has it under its own name; else the module that `target` names: a lambda,
    a partial or a function that another one returned exists only there.
    """
    inner = innermost(function)
    defining = sys.modules.get(inner.__module__)
    if defining and getattr(defining, inner.__name__, None) is function:
        return defining, inner.__name__
    source, name = _split(target)
    return sys.modules[Path(str(source)).stem if str(source).endswith(".py") else str(source)], name


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function inside decorators and functools.partial: the one with a file and type hints."""
    while isinstance(function, partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, partial) else function.__wrapped__
    return function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__


def _split(target: str) -> tuple[str | None, str]:
    """Returns the file or module that a target names, None for an unknown name, and the function in it."""
    if ":" in target:
        source, _, function = target.rpartition(":")
        return source, function
    if target.endswith(".py"):
        return target, "job"
    return (f"samestep.jobs.{target}" if target in builtin_names() else None), "job"


def _import(source: str, function: str) -> ModuleType:
    """Imports a job's file or module. Raises UserError with the line that failed, and, before anything in it runs, for
    one that does not have `function`: it may be a training script."""
    try:
        with as_exceptions():
            return _imported(source, function)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            message(
                "job_does_not_import",
                job=source,
                line=_line(error, source),
                error=error_line(error),
                hint=_import_hint(error, source),
            )
        ) from error


def _imported(source: str, function: str) -> ModuleType:
    if not source.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        spec = importlib.util.find_spec(source)
        if spec and spec.origin and spec.origin.endswith(".py") and source not in sys.modules:
            _check_has(function, source, Path(spec.origin))
        return importlib.import_module(source)
    path = Path(source).resolve()
    if not path.is_file():
        raise UserError(message("job_file_is_a_folder" if path.is_dir() else "no_such_job_file", file=source))
    _check_has(function, source, path)
    sys.path.insert(0, str(path.parent))  # a job file may import modules beside it, as a script may
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that what it defines can be pickled for loader workers
    spec.loader.exec_module(module)
    return module


def _import_hint(error: BaseException, source: str) -> Message | None:
    """Returns what to do about a job that does not import, where a folder explains it; else None."""
    folder = Path(source).resolve().parent if source.endswith(".py") else Path.cwd()
    if hiding := hiding_files(folder):
        return message("file_hides_a_module_of_python", file=hiding[0])
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name and source.endswith(".py") and (Path(name).is_dir() or Path(f"{name}.py").is_file()):
        return message("module_is_in_the_current_folder", module=name)
    return None


def _check_has(function: str, source: str, path: Path) -> None:
    """Raises UserError for a file whose text does not bind `function` at its top: define, assign or import it."""
    with tokenize.open(path) as file:
        text = file.read()
    top = symtable.symtable(text, str(path), "exec").get_symbols()
    bound = {name.get_name() for name in top if name.is_assigned() or name.is_imported()}
    if {function, "__getattr__"} & bound or "globals" in {name.get_name() for name in top}:
        return
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global) and function in node.names:
            return
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            return  # it may bring the function
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    hint = nearest_name(function, functions[:12]) if functions else message("file_defines_no_function")
    raise UserError(message("job_file_has_no_function", file=source, function=function, hint=hint))


def settings_of(function: Callable[..., Any]) -> dict[str, str]:
    """Returns a job function's settings: name -> type and default, as text."""
    return {
        name: str(p).partition(":")[2].strip()
        for name, p in inspect.signature(function, eval_str=True).parameters.items()
    }


def values_of(
    function: Callable[..., Any], texts: Mapping[str, str], what: Message, flag: str, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Converts `texts` to the types that `function` declares for its arguments of these names.

    what, flag: the function and the option, for the errors. settings: those that the option takes besides. Raises
    UserError for an unknown name or a wrong value.
    """
    try:
        hints = get_type_hints(innermost(function))
    except Exception as error:
        raise UserError(message("annotations_cannot_be_read", what=what, error=error_line(error))) from error
    parameters = inspect.signature(function).parameters
    values: dict[str, Any] = {}
    for name, text in texts.items():
        if name not in parameters:
            known = [*dict.fromkeys([*parameters, *settings])]
            hint = nearest_name(name, known) if parameters else message("function_has_no_arguments")
            raise UserError(message("no_such_setting", what=what, name=name, hint=hint))
        default = parameters[name].default
        kind = hints.get(name, str if default in (None, inspect.Parameter.empty) else type(default))
        literals = {str(value): value for value in get_args(kind)} if get_origin(kind) is Literal else {}
        if text in literals:  # of whole numbers too, which pydantic does not read from text
            values[name] = literals[text]
            continue
        try:
            values[name] = TypeAdapter(kind).validate_strings(text)
        except ValidationError:
            expected = " or ".join(literals) or getattr(kind, "__name__", str(kind))
            raise UserError(
                message("setting_takes_other_values", flag=flag, name=name, value=text, values=expected)
            ) from None
        if isinstance(values[name], float) and not math.isfinite(values[name]):
            raise UserError(message("setting_must_be_finite", flag=flag, name=name, value=text))
    return values


def build(target: str, settings: Mapping[str, str], compiled: bool = True) -> Job:
    """Calls the job function with `settings` (texts of --set) and returns its Job. Raises UserError when that fails.

    Its model has the names that it has uncompiled. compiled: whether it compiles what the job compiles.
    """
    job = build_by(find(target), target, settings)
    return replace(job, model=partial(_built, job.model, without_wrappers if compiled else uncompiled))


def _built(model: Callable[[], Any], change: Callable[[Any], Any]) -> Any:
    """Calls the job's model, and changes the module that it returns. The inspection names what is none."""
    built = model()
    return change(built) if hasattr(built, "_modules") else built


def build_by(function: Callable[..., Any], target: str, settings: Mapping[str, str]) -> Job:
    """Does the same by a function that `find` has returned for `target`."""
    parameters = inspect.signature(function).parameters
    general = {name: text for name, text in settings.items() if name not in parameters and name in GENERAL}
    declared = {name: text for name, text in settings.items() if name not in general}
    the_job = message("the_job", job=target)
    values = values_of(function, declared, the_job, "--set", GENERAL)
    absent = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in values]
    if absent:
        raise UserError(message("job_needs_a_setting", job=target, name=absent[0]))
    try:
        with as_exceptions():
            job = function(**values)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            message("job_raised_while_it_was_built", job=target, line=_line(error, target), error=error_line(error))
        ) from error
    if not isinstance(job, Job):
        raise UserError(message("job_returned_no_job", job=target, type=type(job).__name__))
    return replace(job, **values_of(general_settings, general, the_job, "--set"))


def general_settings(
    max_steps: int | None = None,
    micro_batch: int | None = None,
    workers: int = 0,
    prefetch: int = 2,
    save: Literal["all", "trainable"] = "all",
    last: Literal["keep", "drop"] = "keep",
    shuffle: bool = True,
    sync_batchnorm: bool = False,
    gather_outputs: bool = False,
) -> None:
    """Declares the settings that every job has, even if its function does not declare them."""


GENERAL = tuple(inspect.signature(general_settings).parameters)


def _line(error: BaseException, target: str) -> int | None:
    """Returns the line of the innermost frame in the job's file; None where there is none."""
    import traceback

    stem = Path(target.partition(":")[0]).stem
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).stem == stem]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    return lines[-1] if lines else None
