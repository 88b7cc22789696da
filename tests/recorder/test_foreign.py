"""What observes a script asks its objects nothing that they answer by code of their own."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from budget import budget
from command import samestep
from samestep.job.foreign import ById, attribute_of, is_a, named_buffers_in, named_parameters_in, named_parts_in

RECORDER = Path(__file__).parents[2] / "src" / "samestep" / "recorder"
SCRIPT = Path(__file__).parent / "hostile_objects.py"
# Each hashes, compares, or asks an object for an attribute; samestep.job.foreign has one for each that does not.
ASKS = {"isinstance", "WeakSet", "WeakKeyDictionary", "WeakIdKeyDictionary", "WeakTensorKeyDictionary"}
WALKS = {"named_modules", "modules", "named_parameters", "parameters", "named_buffers", "buffers"}


def asks(source: str) -> Iterator[str]:
    """Yields what a module of the recorder asks of objects."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id in ASKS:
            yield node.id
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from ASKS & {alias.name for alias in node.names}
        if isinstance(node, ast.Attribute) and node.attr in ASKS:
            yield node.attr
        match node:
            # self.parameters.buffers() and the like are the recorder's own.
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute)) if attribute in WALKS:
                yield from [attribute] * (name != "self")


@pytest.mark.parametrize("path", sorted(RECORDER.glob("*.py")), ids=lambda path: path.stem)
def test_the_recorder_asks_no_object(path: Path) -> None:
    assert [*asks(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "source",
    ["isinstance(x, int)", "from weakref import WeakSet", "weakref.WeakSet()", "any(module.parameters())"],
)
def test_a_question_is_found(source: str) -> None:
    assert [*asks(source)]


def test_a_training_of_hostile_objects_is_the_same_when_it_is_recorded(tmp_path: Path) -> None:
    plain, recorded = (
        subprocess.run(
            [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=budget(), check=False
        )
        for arguments in ([], [str(tmp_path)])
    )
    assert plain.returncode == recorded.returncode == 0, recorded.stderr
    assert recorded.stdout == plain.stdout
    assert "6 steps of [1, 1, 1, 1, 1, 1]" in recorded.stderr


def test_parts_are_those_of_torch() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.BatchNorm1d(2), shared, nn.Sequential(shared, nn.BatchNorm1d(2), nn.Identity()))
    model.register_parameter("none", None)
    model[2].register_parameter("tied", shared.weight)
    for found, expected in (
        (named_parts_in(model), model.named_modules()),
        (named_parameters_in(model), model.named_parameters()),
        (named_buffers_in(model), model.named_buffers()),
    ):
        assert [(name, id(thing)) for name, thing in found] == [(name, id(thing)) for name, thing in expected]


def test_an_attribute_is_told_without_a_call() -> None:
    class Thing:
        __slots__ = ("place",)
        kind = 3

        @property
        def computed(self) -> int:
            raise ZeroDivisionError

        @property
        def __class__(self) -> type:
            raise ZeroDivisionError

    thing = Thing()
    assert (attribute_of(thing, "place", 1), attribute_of(thing, "kind"), attribute_of(thing, "computed")) == (
        1,
        3,
        None,
    )
    thing.place = 2
    assert attribute_of(thing, "place") == 2 and attribute_of(nn.Linear(1, 1), "weight") is not None
    assert is_a(thing, Thing) and not is_a(thing, nn.Module) and is_a(torch.ones(1), torch.Tensor)


def test_a_table_keeps_nothing_alive() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

    table, thing = ById[int](), Unhashable()
    table.put(thing, 1)
    table.put(3, 1)  # has no weak references
    assert thing in table and table.get(thing, 0) == 1 and table.get(3, 0) == 0
    del thing
    assert [*table] == []


@pytest.mark.check
@pytest.mark.parametrize("command", [("check", "--nproc", "1"), ("monitor", "--", sys.executable)], ids=lambda c: c[0])
def test_commands_leave_objects_and_names_to_the_script(command: tuple[str, ...], tmp_path: Path) -> None:
    """Its own statistics.py is imported, whose name a module of Python's has that samestep has imported before."""
    (tmp_path / "statistics.py").write_text("OWN = 1\n")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.read_text().replace("import torch\n", "import statistics\nimport torch\n", 1))
    with script.open("a") as lines:
        lines.write("assert statistics.OWN\n")
    done = samestep(*command, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
