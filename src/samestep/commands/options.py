"""Options: a dataclass's fields are both a command's options and the Python API's arguments.

A field's type, default and typer metadata (flags, help, limits) stand once, in the dataclass. `from_command_line` gives
typer a function of such dataclasses, `takes` gives one to Python; `Options` checks the values for both.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, ParameterInfo

from samestep.errors import UserError
from samestep.message import message

P = ParamSpec("P")
R = TypeVar("R")
AnyOptions = TypeVar("AnyOptions")
Names = str | Sequence[str]  # one name, several with commas, or a list


@dataclass(frozen=True)
class Typed:
    """How an option is typed on the command line, where its type in Python is wider.

    kind: its type for typer. default: for typer. parse: turns the typed value and the flag into the Python value.
    words: what to give in Python, for the error of a wrong type.
    """

    kind: Any
    default: Any = None
    parse: Callable[[Any, str], Any] = lambda value, _: value
    words: str = ""


class WrongValue(UserError):
    """A value that an option cannot have. why: what to give instead."""

    def __init__(self, name: str, value: object, why: str) -> None:
        self.name, self.value, self.why = name, value, why
        super().__init__(f"{name}={_shown(value)}: {why}")

    def typed_as(self, flag: str) -> UserError:
        """Returns the error of the command line, which has flags."""
        value = self.value if isinstance(self.value, str) and self.value else _shown(self.value)
        return UserError(f"{flag} {_shortened(str(value))}: {self.why}")


class Options:
    """A base of frozen dataclasses of options. Raises WrongValue for a value of a wrong type, a number outside the
    limits that the field's typer metadata names, and a path that no file can have."""

    NOT_TYPED: ClassVar[tuple[str, ...]] = ()  # fields, nested ones too, that are no options of the command line

    def __post_init__(self) -> None:
        for name, (kind, info, typed) in _hints(type(self)).items():
            value = getattr(self, name)
            if not _fits(value, kind):
                raise WrongValue(name, value, f"give {(typed and typed.words) or _described(kind)}")
            low, high = getattr(info, "min", None), getattr(info, "max", None) or LARGEST
            if isinstance(value, int | float) and low is not None and not value >= low:
                raise WrongValue(name, value, f"give {low} or more")
            if isinstance(value, int | float) and not value <= high:
                raise WrongValue(name, value, f"give {high} or less")
            if _is_path(kind) and isinstance(value, str | Path) and (why := why_no_path(value)):
                raise WrongValue(name, value, why)


# The greatest value of each number: more seconds than torch takes, and more of anything else than there is.
LARGEST = 2**31 - 1
NO_SENTINEL = {"KW_ONLY": object}  # a line `_: KW_ONLY` is no field; Python 3.10 refuses it as a type


def takes(kind: Callable[P, AnyOptions]) -> Callable[[Callable[[AnyOptions], R]], Callable[P, R]]:
    """Makes a function of one dataclass `kind` take the dataclass's fields as its own arguments."""

    def decorate(function: Callable[[AnyOptions], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            signature.bind(*args, **kwargs)  # a TypeError names this function's arguments
            return function(kind(*args, **kwargs))

        hints = get_type_hints(kind, localns=NO_SENTINEL)
        parameters = [
            parameter.replace(annotation=hints[parameter.name])
            for parameter in inspect.signature(kind).parameters.values()
        ]
        signature = inspect.Signature(parameters, return_annotation=inspect.signature(function).return_annotation)
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        return wrapper

    return decorate


def from_command_line(command: Callable[..., int]) -> Callable[..., int]:
    """Makes typer see each dataclass of options among a command's parameters as its fields; nested ones come last."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if _is_options(kind)}
    plain_parameters = {
        name: parameter for name, parameter in inspect.signature(command).parameters.items() if name not in groups
    }
    leaves = [leaf for kind in groups.values() for leaf in _leaves(kind) if leaf[0].name not in kind.NOT_TYPED]
    expanded = [(kind in groups.values(), _parameter(field, kind)) for field, kind in leaves]
    parameters = [parameter for is_flat, parameter in expanded if is_flat]
    parameters += [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in plain_parameters.items()
    ]
    parameters += [parameter for is_flat, parameter in expanded if not is_flat]

    @functools.wraps(command)
    def wrapper(**given: Any) -> int:
        packed = {name: _packed(kind, given) for name, kind in groups.items()}
        return command(**packed, **{name: given[name] for name in plain_parameters})

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def arguments(options: Options, kind: type[Options], without: Collection[str] = ()) -> list[str]:
    """Returns the options of `kind` that differ from their defaults as words of a command line.

    without: fields that are left out. Arguments without a flag are left out too.
    """
    words: list[str] = []
    without = (*without, *kind.NOT_TYPED)
    for field in fields(kind):  # type: ignore[arg-type]
        value, flag = getattr(options, field.name), flag_of(kind, field.name)
        inner, info, typed = _hints(kind)[field.name]
        if _is_options(inner):
            words += arguments(value, inner, without)
        elif field.name in without or isinstance(info, ArgumentInfo) or value in (field.default, None, "", []):
            continue
        elif isinstance(value, bool):
            words += [flag if value else f"--no-{flag[2:]}"]
        elif typed and typed.kind == list[str]:  # a flag that is repeated
            pairs = [f"{key}={text}" for key, text in value.items()] if isinstance(value, Mapping) else value
            words += [word for text_of_pair in pairs for word in (flag, text_of_pair)]
        elif isinstance(value, Mapping):
            words += [flag, ",".join(f"{key}={text}" for key, text in value.items())]
        else:
            words += [flag, ",".join(value) if isinstance(value, list | tuple) else str(value)]
    return words


def _is_options(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Options)


Parts = tuple[Any, ParameterInfo | None, Typed | None]


def _hints(kind: type) -> Mapping[str, Parts]:
    """Returns field -> (its type, typer's metadata, how it is typed on the command line)."""
    if kind not in _known:
        hints = get_type_hints(kind, localns=NO_SENTINEL, include_extras=True)
        _known[kind] = {field.name: _parts(hints[field.name]) for field in fields(kind)}
    return _known[kind]


_known: dict[type, Mapping[str, Parts]] = {}


def _parts(hint: Any) -> Parts:
    plain, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    info = next((datum for datum in metadata if isinstance(datum, ParameterInfo)), None)
    return plain, info, next((datum for datum in metadata if isinstance(datum, Typed)), None)


def _leaves(kind: type) -> Iterator[tuple[Field[Any], type]]:
    """Yields each field, and those of nested dataclasses, with its dataclass; positional ones first."""
    for field in sorted(fields(kind), key=lambda field: bool(field.kw_only)):
        inner = _hints(kind)[field.name][0]
        if _is_options(inner):
            yield from _leaves(inner)
        else:
            yield field, kind


def _parameter(field: Field[Any], kind: type) -> inspect.Parameter:
    plain, info, typed = _hints(kind)[field.name]
    required = inspect.signature(kind).parameters[field.name].default is inspect.Parameter.empty
    default = inspect.Parameter.empty if required else typed.default if typed else field.default
    kind_for_typer: Any = typed.kind if typed else plain
    if _is_path(kind_for_typer):  # as a text: typer would take '' for the current folder
        info = copy.copy(info)
        info.metavar = info.metavar or "PATH"  # type: ignore[union-attr]
        kind_for_typer = str | None
    hint: Any = Annotated[kind_for_typer, info]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _packed(kind: type, given: Mapping[str, object]) -> Any:
    """Builds a dataclass of options from the values of the command line."""
    values = {}
    for name, (plain, _, typed) in _hints(kind).items():
        if _is_options(plain):
            values[name] = _packed(plain, given)
        elif name in given:
            values[name] = typed.parse(given[name], flag_of(kind, name)) if typed else given[name]
            if _is_path(typed.kind if typed else plain) and values[name]:
                values[name] = path(str(values[name]), _typed_name(kind, name))
    try:
        return kind(**values)
    except WrongValue as error:
        raise error.typed_as(_typed_name(kind, error.name)) from None


def _typed_name(kind: type, name: str) -> str:
    """Returns what the help calls a field: the flag, or JOB for the argument `job`."""
    return name.upper() if isinstance(_hints(kind)[name][1], ArgumentInfo) else flag_of(kind, name)


def flag_of(kind: type, name: str) -> str:
    """Returns the flag of a field, as in --evaluate-every."""
    first = getattr(_hints(kind)[name][1], "default", ...)  # typer's Option keeps it there, inside Annotated
    return first if isinstance(first, str) else f"--{name.replace('_', '-')}"


def _fits(value: Any, kind: Any) -> bool:
    """Returns whether a value is of a type; a list is a tuple, a whole number is a float, and neither is a bool."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, element) for element in inner)
    if origin is tuple or origin is Sequence:
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and all(_fits(element, inner[0]) for element in value)
        )
    if origin is Mapping:
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if origin is Callable:
        return callable(value)
    if isinstance(value, bool) and kind is not bool:
        return False
    return isinstance(value, int | float if kind is float else kind)


_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", NoneType: "None"}
_WORDS |= {Path: "a path"}
_ORIGINS: dict[Any, str] = {
    tuple: "a list of strings",
    Sequence: "a list of strings",
    Mapping: "a mapping from names to values",
}
_ORIGINS |= {Callable: "a function"}


def _described(kind: Any) -> str:
    """Returns 'a whole number or None' for int | None."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_described, get_args(kind))))
    return _ORIGINS.get(get_origin(kind)) or _WORDS.get(kind) or f"a {kind.__name__}"


def _is_path(kind: Any) -> bool:
    return kind is Path or Path in get_args(kind)


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}…"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else f"<{type(value).__name__}>"


def names(given: Names, flag: str) -> tuple[str, ...]:
    """Parses 'a, b' into ('a', 'b'). Raises UserError for a text without a name, and for a place without one."""
    words = [word for part in given.split(",") for word in part.split() or [""]] if isinstance(given, str) else given
    if not given:
        return ()
    if not all(word.strip() for word in words):
        is_empty = not any(word.strip() for word in words)
        raise UserError(
            message("option_names_none" if is_empty else "option_has_an_empty_name", flag=flag, value=given)
        )
    return tuple(words)


def pairs(given: Sequence[str], flag: str) -> dict[str, str]:
    """Parses ['a=1'] into {'a': '1'}. Raises UserError for a pair without '=', and for two of one name."""
    wrong = [pair for pair in given if "=" not in pair]
    if wrong:
        raise UserError(message("option_is_no_pair", flag=flag, value=wrong[0]))
    values: dict[str, str] = {}
    for name, value in (pair.split("=", 1) for pair in given):
        if name in values:
            raise UserError(
                message("option_gives_a_name_twice", flag=flag, name=name, first=values[name], second=value)
            )
        values[name] = value
    return values


def path(text: str, name: str) -> Path:
    """Parses a path of the command line, where ~ is the user's folder also in --out=~/x, which no shell expands.

    name: the option's or the argument's. Raises UserError for a path that no file can have, and a user who is none.
    """
    if why := why_no_path(text):
        raise UserError(f"{name} {_shortened(text) or repr(text)}: {why}")
    try:
        return Path(text).expanduser() if text.startswith("~") else Path(text)
    except RuntimeError:
        raise UserError(f"{name} {_shortened(text)}: there is no such user; write ./{_shortened(text)}") from None


def why_no_path(given: str | Path) -> str | None:
    """Returns what is wrong with a path that no file can have, and one that this user may not look for; else None."""
    if not str(given):
        return "the path is empty; name one"
    try:
        os.stat(given)
    except (FileNotFoundError, NotADirectoryError):
        return None  # as the path of a file to be made; options that need an existing file say so
    except OSError as error:
        return f"this path cannot be used ({error.strerror}); name another"
    except ValueError:
        return "a path has no null byte; name another"
    return None


def refuse(given: Mapping[str, object], why: str) -> None:
    """Raises UserError for the first of the options that is set."""
    for option, value in given.items():
        if value:
            raise UserError(f"{option} {why}")
