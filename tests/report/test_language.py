"""The catalogues of sentences: each id has both languages and the fields that its code gives, and is said somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import golden_file
import pytest

from samestep.doctor.probes.variables import known_variables
from samestep.errors import UserError, say
from samestep.message import AS_SAID, Message, as_said, message
from samestep.report import language

PACKAGE = Path(__file__).parents[2] / "src" / "samestep"


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def calls() -> Iterator[tuple[str, str, set[str] | None]]:
    """Yields (place, id, names of the fields; None where some come by **) of each message that the code makes."""
    for path in sorted(PACKAGE.rglob("*.j2")):
        for found in re.finditer(r'\bmessage\("(\w+)"(?=([^}%]*))', path.read_text()):
            yield path.name, found[1], set(re.findall(r"(\w+)=", found[2]))
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "message":
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                names = {keyword.arg for keyword in node.keywords if keyword.arg}
                complete = all(keyword.arg for keyword in node.keywords)
                identities = [node.args[0]]
                if isinstance(node.args[0], ast.IfExp):
                    identities = [node.args[0].body, node.args[0].orelse]
                for identity in identities:
                    assert isinstance(identity, ast.Constant), f"{place}: write the id where the message is made"
                    yield place, identity.value, names if complete else None


def test_each_message_has_sentences_with_its_fields() -> None:
    for place, identity, names in calls():
        sentences = language.templates_of(identity)
        assert sentences, f"{place}: {identity} is in no file of report/sentences, and is no rule"
        for into in language.LANGUAGES:
            shown = language.names_of(sentences[into])
            assert names is None or shown <= names, f"{place}: {identity} has no field {shown - (names or set())}"


def test_each_id_is_plain_said_somewhere_and_in_both_languages() -> None:
    said = {identity for _, identity, _ in calls()} | {AS_SAID}
    # Where the id is chosen apart from the call, it stands in the code as a text of its own.
    texts = {
        node.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    # The meaning of an environment variable has the variable's name.
    texts |= {name.lower() for name in known_variables()} | {known.cost for known in known_variables().values()}
    for identity in language.sentence_ids():
        sentences = language.templates_of(identity)
        assert sentences
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", identity)
        assert set(sentences) == {*language.LANGUAGES}, f"{identity} is not in each language"
        english, chinese = (language.names_of(sentences[into]) for into in language.LANGUAGES)
        assert english == chinese, f"{identity}: the languages show other fields: {english ^ chinese}"
        assert identity in said | texts, f"nothing says {identity}"


class _Example(Mapping[str, object]):
    """A value for each field of a sentence: its name in brackets, or a number where it is counted or formatted."""

    def __init__(self, template: str, count: int) -> None:
        self.specs = dict(re.findall(r"\{(\w+):([^}]*)\}", template))
        self.names, self.count = language.names_of(template), count

    def __getitem__(self, name: str) -> object:
        spec = self.specs.get(name)
        if spec in ("ranks", "first"):
            return [*range(self.count)] if spec == "ranks" else [f"<{name} {n}>" for n in range(self.count)]
        return f"<{name}>" if spec is None else self.count

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@pytest.mark.parametrize("into", language.LANGUAGES)
def test_the_golden_file_holds_every_sentence(into: language.Language) -> None:
    lines = []
    for identity in language.sentence_ids():
        sentences = language.templates_of(identity) or {}
        counts = (1, 3) if re.search(r"\{\w+:", sentences[into]) else (3,)
        examples = [Message(identity, {**_Example(sentences[into], count)}) for count in counts]
        lines += [identity, *(f"    {language.text(example, into)}" for example in examples)]
    golden_file.agrees(into, lines)


NESTED: dict[str, object] = {"id": "did_you_mean", "fields": {"name": 1}}
for _ in range(300):
    NESTED = {"id": "did_you_mean", "fields": {"name": [NESTED]}}
VALUES = [None, [], {}, "x", True, -1, 1e400, 10**400, 10**5000, [None], [{"a": [1]}], [0, 10**12], ["a", "b"], NESTED]
VALUES += [
    {"id": None, "fields": 5},
    {"id": "did_you_mean", "fields": {}},
    {"id": "of_no_catalogue", "fields": {"a": {}}},
]


def test_each_sentence_is_made_whatever_its_fields() -> None:
    """A message may come from anybody's file: without a field, or with any value in its place."""
    for identity in language.sentence_ids():
        sentences = language.templates_of(identity) or {}
        names = language.names_of(sentences["en"])
        without = [{name: 3 for name in names if name != absent} for absent in names]
        for fields in [{}, *without, *({name: value for name in names} for value in VALUES)]:
            said = Message(identity, fields)
            for into in language.LANGUAGES:
                language.text(said, into)
            said.as_written()
    assert str(Message("of_no_catalogue", {"a": 10**5000, "b": NESTED})).startswith("of_no_catalogue (a=…, b=")


def test_a_field_that_is_absent_or_of_another_kind_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = "{ranks:ranks} {ranks:is|are} {steps:n step}, {names:first}, {share:.0%}"
    monkeypatch.setattr(language, "catalogue", lambda: {"forms": {"en": forms, "zh": forms}})
    assert language.text(message("forms"), "en") == "rank ? are ? steps, ?, ?"
    other = message("forms", ranks=["a", None], steps=None, names=7, share="half")
    assert language.text(other, "en") == "ranks a,  are ? steps, 7, half"


def test_the_forms_of_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = "{ranks:ranks} {ranks:is|are} {steps:n step}[[ of {asked}]], {names:first}; {share:.0%}; {inner}"
    sentences = {"forms": {"en": forms, "zh": forms}, "inner": {"en": "in", "zh": "里"}}
    monkeypatch.setattr(language, "catalogue", lambda: sentences)
    names = [*"abcde"]
    said = message("forms", ranks=(0, 1), steps=1, asked=None, names=names, share=0.5, inner=message("inner"))
    assert language.text(said, "en") == "ranks 0-1 are 1 step, a, b, c, d …; 50%; in"
    assert language.text(said, "zh") == "rank 0、1 are 1 step, a、b、c、d …; 50%; 里"
    assert Message(said.id, {**said.fields, "inner": {"id": "inner", "fields": {}}}) == said  # as read from JSON


def test_the_language_is_that_of_the_option_of_the_variable_or_of_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (language.VARIABLE, *language.LOCALES):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    assert language.language() == "en"
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert language.language() == "zh"
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert language.language() == "en"
    language.use_language("zh")
    assert language.language() == "zh"
    with pytest.raises(UserError, match="--lang=fr"):
        language.use_language("fr")


def test_what_comes_from_elsewhere_is_said_as_it_is() -> None:
    assert language.text(as_said("no {braces} are read")) == "no {braces} are read"
    assert language.text(Message("of_another_version", {"step": 3})) == "of_another_version (step=3)"
    (said,) = language.with_english([as_said("a sentence")])
    assert (said.english, str(said)) == ("a sentence", "a sentence")


def test_the_parent_says_a_message_in_its_language(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentences = {"found": {"en": "found {count:n step}", "zh": "找到{count:n 步}"}}
    monkeypatch.setattr(language, "catalogue", lambda: sentences)
    found = message("found", count=2)
    for name, line in (("en", "found 2 steps"), ("zh", "找到2 步")):
        monkeypatch.setenv(language.VARIABLE, name)
        say(found)
        assert capsys.readouterr().err == f"samestep: {line}\n"
        assert str(UserError(found)) == line
