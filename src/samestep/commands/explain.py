"""explain: says what a mistake is that `samestep check` names, and shows lines that have it beside the right ones."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from samestep.errors import UserError, nearest_name
from samestep.message import message
from samestep.report.language import sentence_with_names, text
from samestep.rules import rule_ids, rule_of


def explained(identity: str) -> Iterator[str]:
    """Yields the paragraphs that explain a mistake. Raises UserError for an unknown id."""
    rule = rule_of(identity)
    if rule is None:
        hint = nearest_name(identity, sorted(rule_ids()), otherwise=message("explain_lists_mistakes"))
        raise UserError(message("no_such_mistake", id=identity, hint=hint))
    yield identity
    yield sentence_with_names(identity)
    if rule.broken:
        yield f"{text(message('lines_with_the_mistake'))}\n\n{_indented(rule.broken)}"
        yield f"{text(message('lines_without_the_mistake'))}\n\n{_indented(rule.right)}"
    if rule.patch:
        yield text(message("mistake_has_a_patch"))


def mistakes() -> Iterator[str]:
    """Yields a line for each mistake: its id, and how its sentence begins."""
    for identity in sorted(rule_ids()):
        yield f"{identity}  {textwrap.shorten(sentence_with_names(identity), 100, placeholder=' …')}"


def _indented(lines: str) -> str:
    return textwrap.indent(lines.strip("\n"), "    ")
