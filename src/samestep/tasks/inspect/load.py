"""Loading a job: finds the function that a name means, and turns --set texts into the types it declares."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from samestep.errors import UserError, nearest
from samestep.job import Job


def builtin_names() -> list[str]:
    """The jobs that come with samestep: the files in jobs/."""
    import samestep.jobs

    return sorted(m.name for m in pkgutil.iter_modules(samestep.jobs.__path__) if not m.ispkg)


def find(target: str) -> Callable[..., Any]:
    """The job function behind `target`: a built-in name, `file.py[:function]`, `package.module:function`, or a file of
    the Python API's (job.pkl)."""
    if target.endswith(".pkl"):
        return _unpickled(target)
    place, function = _split(target)
    if place is None:
        hint = nearest(target, builtin_names())
        hint += "" if hint.endswith("?") else "."
        raise UserError(f"there is no job '{target}'; {hint} A job of your own is given as file.py:function")
    module = _import(place)
    found = getattr(module, function, None)
    if not callable(found):
        functions = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        hint = nearest(function, functions[:12]) if functions else "it defines none"
        raise UserError(f"{place} has no function '{function}'; {hint}")
    return found  # type: ignore[no-any-return]


def _unpickled(target: str) -> Callable[..., Any]:
    """What samestep.commands.api has written of a function that no file holds."""
    import cloudpickle

    try:
        path, function = cloudpickle.loads(Path(target).read_bytes())
        sys.path += [place for place in path if place not in sys.path]
    except Exception as error:
        raise UserError(f"the job does not load in another process: {_says(error)}") from error
    return cast(Callable[..., Any], function)


def home(target: str, function: Callable[..., Any]) -> tuple[ModuleType, str]:
    """The module that holds the function which find() gave for `target`, and its name there.

    That is where it was written, if that module has it under its own name; else where it was asked for: a function
    that another one made, a lambda or a partial is known there alone.
    """
    inner = innermost(function)
    wrote = sys.modules.get(inner.__module__)
    if wrote and getattr(wrote, inner.__name__, None) is function:
        return wrote, inner.__name__
    place, name = _split(target)
    return sys.modules[Path(str(place)).stem if str(place).endswith(".py") else str(place)], name


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside what a decorator or functools.partial made of it: the one that has a file and hints."""
    while isinstance(function, partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, partial) else function.__wrapped__
    return function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__


def _split(target: str) -> tuple[str | None, str]:
    """The file or module of a target, None where it names no job that there is; and the function in it."""
    if ":" in target:
        place, _, function = target.rpartition(":")
        return place, function
    if target.endswith(".py"):
        return target, "job"
    return (f"samestep.jobs.{target}" if target in builtin_names() else None), "job"


def _import(place: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(place)
        path = Path(place).resolve()
        if not path.is_file():
            raise UserError(f"there is no job file {place}; give the path of a Python file, as in my_job.py:job")
        sys.path.insert(0, str(path.parent))  # a job file may import its neighbours, as a script may
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # so that what it defines can be pickled for loader workers
        spec.loader.exec_module(module)
        return module
    except UserError:
        raise
    except BaseException as error:
        raise UserError(f"the job {place} does not import: {_where(error, place)}{_says(error)}") from error


def settings_of(function: Callable[..., Any]) -> dict[str, str]:
    """The settings of a job function: name -> its type and default, as text."""
    return {
        name: str(p).partition(":")[2].strip()
        for name, p in inspect.signature(function, eval_str=True).parameters.items()
    }


def values_of(function: Callable[..., Any], texts: Mapping[str, str], what: str, flag: str) -> dict[str, Any]:
    """`texts`, as given to `flag`, as the types that `function` declares for its arguments of these names.

    Raises UserError for a name that it does not have and a text that does not fit; `what` names the function there.
    """
    try:
        hints = get_type_hints(innermost(function))
    except Exception as error:
        raise UserError(f"the annotations of {what} cannot be read: {_says(error)}") from error
    parameters = inspect.signature(function).parameters
    values: dict[str, Any] = {}
    for name, text in texts.items():
        if name not in parameters:
            known = (
                nearest(name, list(parameters)) if parameters else "it has none: give its function keyword arguments"
            )
            raise UserError(f"{what} has no setting '{name}'; {known}")
        default = parameters[name].default
        kind = hints.get(name, str if default in (None, inspect.Parameter.empty) else type(default))
        literals = {str(value): value for value in get_args(kind)} if get_origin(kind) is Literal else {}
        if text in literals:  # of whole numbers too, which pydantic does not read from text
            values[name] = literals[text]
            continue
        try:
            values[name] = TypeAdapter(kind).validate_strings(text)
        except ValidationError:
            shown = " or ".join(literals) or getattr(kind, "__name__", str(kind))
            raise UserError(f"{flag} {name}={text}: '{name}' takes {shown}, not '{text}'") from None
    return values


def build(target: str, settings: Mapping[str, str]) -> Job:
    """Calls the job function with `settings` (texts, as given to --set) and returns its Job."""
    function = find(target)
    own = inspect.signature(function).parameters
    general = {name: text for name, text in settings.items() if name not in own and name in GENERAL}
    mine = {name: text for name, text in settings.items() if name not in general}
    values = values_of(function, mine, f"the job {target}", "--set")
    absent = [n for n, p in own.items() if p.default is inspect.Parameter.empty and n not in values]
    if absent:
        raise UserError(f"the job {target} needs a value for '{absent[0]}': give --set {absent[0]}=…")
    try:
        job = function(**values)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"the job {target} raised while it was built: {_where(error, target)}{_says(error)}") from error
    if not isinstance(job, Job):
        raise UserError(f"the job {target} returned {type(job).__name__}, not a samestep.Job")
    return replace(job, **values_of(of_every_job, general, f"the job {target}", "--set"))


def of_every_job(
    micro_batch: int | None = None,
    workers: int = 0,
    prefetch: int = 2,
    last: Literal["keep", "drop"] = "keep",
    shuffle: bool = True,
    sync_batchnorm: bool = False,
) -> None:
    """The settings that every job has, also those whose function does not declare them: they change how a training is
    carried out, or drop the rows that do not fill a batch."""


GENERAL = tuple(inspect.signature(of_every_job).parameters)


def _says(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _where(error: BaseException, target: str) -> str:
    """'line N: ' of the innermost frame in the job's own file."""
    import traceback

    stem = Path(target.partition(":")[0]).stem
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).stem == stem]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    return f"line {lines[-1]}: " if lines else ""
