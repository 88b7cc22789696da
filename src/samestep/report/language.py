"""Puts messages into sentences, in English or in Chinese.

The catalogues are the files of report/sentences: a table for each id of a message, with its sentence in each language.
Those of mistakes are in the files of samestep/rules, those of environment variables in doctor/variables.toml.

    [ranks_take_different_steps]
    en = "rank {rank} takes {found:n optimizer step}[[, and {lost:ranks} {lost:is|are} lost]]"
    zh = "…"

A {name} stands for a field. After a colon stands how it is shown: as in Python's format (`{share:.0%}`), or

    {count:n step}     1 step, 3 steps          {count:is|are}   the first for one, the second for none and for several
    {ranks:ranks}      rank 1; ranks 0-2, ranks 0, 3   {names:first}    the first four of a list

A list is joined by commas, a message becomes its sentence, None is nothing. What stands in [[ ]] is left out where one
of its fields is None, False, or empty. In Chinese, `{count:n 步}` is '3 步'.

A message may come from anybody's file, and always has a sentence: a field that is absent is '?', and one that cannot be
shown as its sentence wants is shown as it is.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

from samestep.errors import UserError
from samestep.message import Message, render_with
from samestep.records.toml_files import read_toml
from samestep.rules import rule_ids, rule_of

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)
VARIABLE = "SAMESTEP_LANG"
LOCALES = ("LC_ALL", "LC_MESSAGES", "LANG")
SENTENCES = Path(__file__).parent / "sentences"
VARIABLES = Path(__file__).parents[1] / "doctor" / "variables.toml"
OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
T = TypeVar("T")


def use_language(name: str) -> None:
    """Makes this process print in a language: 'en' or 'zh'. Raises UserError for another."""
    if name not in LANGUAGES:
        raise UserError(f"--lang={name}: the languages are {' and '.join(LANGUAGES)}")
    os.environ[VARIABLE] = name


def language() -> Language:
    """Returns the language of this process: that of SAMESTEP_LANG, else the locale's, else English."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in LANGUAGES:
        # The first variable that is set decides, as for setlocale.
        locale = next((os.environ[name] for name in LOCALES if os.environ.get(name)), "")
        chosen = "zh" if locale.startswith("zh") else "en"
    return cast(Language, chosen)


@cache
def catalogue() -> Mapping[str, Mapping[Language, str]]:
    """Returns the sentences of all ids: id -> language -> template. Raises ValueError for an id in two files."""
    sentences: dict[str, Mapping[Language, str]] = {}
    for path in sorted(SENTENCES.glob("*.toml")):
        tables = read_toml(path)
        if twice := sentences.keys() & tables.keys():
            raise ValueError(f"{path.name}: {min(twice)} is in another file, too")
        sentences |= tables
    # The meaning of an environment variable has the variable's name.
    for name, table in read_toml(VARIABLES).items():
        if "en" in table:
            sentences[name.lower()] = {into: table[into] for into in LANGUAGES}
    return sentences


def templates_of(identity: str) -> Mapping[Language, str] | None:
    """Returns the sentences of an id: language -> template; None for an unknown one."""
    rule = None if identity in catalogue() else rule_of(identity)
    return {"en": rule.en, "zh": rule.zh} if rule else catalogue().get(identity)


def sentence_ids() -> list[str]:
    """Returns all ids that have sentences, those of mistakes among them, in the order of the alphabet."""
    return sorted([*catalogue(), *rule_ids()])


def sentence_with_names(identity: str) -> str:
    """Returns the sentence of an id, with the names of its fields in place of what was found."""
    templates = templates_of(identity) or {}
    return text(Message(identity, {name: f"<{name}>" for name in names_of(templates.get("en", ""))}))


def text(said: Message, into: Language | None = None) -> str:
    """Returns a message's sentence, in this process's language or in another; one of an unknown id as it is written."""
    into = into or language()
    templates = templates_of(said.id)
    if templates is None:  # a file from elsewhere may say anything
        return said.as_written()
    formatter = _Formatter(into)
    template = OPTIONAL.sub(lambda part: _part(part[1], said.fields), templates[into])
    return formatter.vformat(template, (), said.fields)


def with_english(value: T) -> T:
    """Returns a record with the English sentences of all messages in it: for the file that it is written to."""
    if isinstance(value, Message):
        return cast(T, replace(value, english=text(value, "en")))
    if is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        changed = {name: with_english(inner) for name, inner in held.items()}
        return cast(T, replace(value, **{name: new for name, new in changed.items() if new is not held[name]}))
    if isinstance(value, list | tuple):
        rows = [with_english(inner) for inner in value]
        same = all(new is old for new, old in zip(rows, value))
        return value if same else cast(T, rows if isinstance(value, list) else tuple(rows))
    if isinstance(value, dict):
        table = {key: with_english(inner) for key, inner in value.items()}
        return value if all(table[key] is value[key] for key in table) else cast(T, table)
    return value


def names_of(template: str) -> set[str]:
    """Returns the names of the fields that a template shows."""
    plain = OPTIONAL.sub(lambda part: part[1], template)
    return {name for _, name, _, _ in string.Formatter().parse(plain) if name is not None}


def _part(template: str, values: Mapping[str, Any]) -> str:
    """Returns an optional part of a template; '' where one of its fields is missing."""
    values_shown = (values.get(name) for name in names_of(template))
    return "" if any(value is None or value is False or value in ("", []) for value in values_shown) else template


class _Formatter(string.Formatter):
    """Formats fields as the head of this module says."""

    def __init__(self, into: Language) -> None:
        self.into: Language = into

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return kwargs.get(field_name, "?"), field_name  # fields only: no attributes, no indices

    def format_field(self, value: Any, format_spec: str) -> str:
        try:
            return self._formatted(value, format_spec)
        # The field is of another kind, or beyond what Python formats so.
        except (TypeError, ValueError, ArithmeticError):
            return self._shown(value)

    def _formatted(self, value: Any, spec: str) -> str:
        if "|" in spec:
            singular, plural_form = spec.split("|")
            return singular if _count(value) == 1 else plural_form
        if spec.startswith("n "):
            noun, count = spec[2:], _count(value)
            plural = "es" if noun.endswith(("batch", "branch", "s")) else "s"
            number = f"{count:,}" if isinstance(count, int | float) else self._shown(count) or "?"
            return f"{number} {noun}{plural if self.into == 'en' and count != 1 else ''}"
        if spec == "ranks":
            return self._ranks(value if isinstance(value, list) else [value])
        if spec == "first" and isinstance(value, list):
            return self._shown(value[:4]) + (" …" if len(value) > 4 else "")
        return format(value, spec) if spec and spec != "first" else self._shown(value)

    def _shown(self, value: Any) -> str:
        if isinstance(value, Message):
            return text(value, self.into)
        if isinstance(value, list):
            return ("、" if self.into == "zh" else ", ").join(map(self._shown, value))
        return "" if value is None else str(value)

    def _ranks(self, ranks: list[Any]) -> str:
        if self.into == "zh":
            return f"rank {self._shown(ranks)}"
        numbered = all(isinstance(rank, int) for rank in ranks)
        if numbered and len(ranks) > 1 and ranks == [*range(ranks[0], ranks[0] + len(ranks))]:
            return f"ranks {ranks[0]}-{ranks[-1]}"
        return f"rank{'s' if len(ranks) > 1 else ''} {self._shown(ranks)}"


def _count(value: Any) -> Any:
    return len(value) if isinstance(value, list) else value


render_with(text)
