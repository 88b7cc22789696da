"""Tensors are found in what jobs and their libraries nest them, and the types stay."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch

from samestep.job.walk import leaves_of, mapped, mapped_tensors, outline, text_of

Named = namedtuple("Named", "x y")


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


class Sub(Named):
    pass


class Rows(list[Any]):
    pass


class Fields(dict[str, Any]):
    pass


class Columns:
    """Has keys, and is no Mapping."""

    def __init__(self, **columns: Any) -> None:
        self.columns = columns

    def keys(self) -> Any:
        return self.columns.keys()

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.columns = {**self.columns, name: value}


ONE, TEXT = torch.ones(2), "text"
NESTED = [
    (ONE, TEXT),
    Rows([ONE, TEXT]),
    Named(ONE, TEXT),
    Sub(ONE, TEXT),
    Frozen(ONE, TEXT),
    Fields(x=ONE, y=TEXT),
    OrderedDict(x=ONE, y=TEXT),
    UserDict(x=ONE, y=TEXT),
    MappingProxyType({"x": ONE, "y": TEXT}),
    Columns(x=ONE, y=TEXT),
]


@pytest.mark.parametrize("data", NESTED, ids=lambda data: type(data).__name__)
def test_tensors_are_found_and_changed_in_every_container(data: Any) -> None:
    whole = {"inner": [data, None]}
    assert [*map(id, leaves_of(whole))] == [id(ONE), id(TEXT), id(None)]
    doubled = mapped_tensors(lambda tensor: tensor * 2, whole)
    assert type(doubled["inner"][0]) is type(data)
    assert torch.equal(leaves_of(doubled)[0], ONE * 2)
    assert leaves_of(doubled)[1:] == [TEXT, None]
    assert leaves_of(data)[0] is ONE  # which is as it was


def test_trees_of_one_form_are_walked_together() -> None:
    pair = mapped(lambda a, b: a + b, UserDict(x=1, y=[2]), UserDict(x=10, y=[20]))
    assert pair == UserDict(x=11, y=[22])
    with pytest.raises(ValueError, match="shorter"):
        mapped(lambda a, b: a, [1, 2], [1])


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, Fields, lambda items: Columns(**dict(items))])
def test_the_order_of_keys_does_not_matter(kind: Any) -> None:
    """It may be that of a set, which is another one in each process."""
    trees = [{"outer": kind(items)} for items in ([("b", 1), ("a", {2, 3})], [("a", {2, 3}), ("b", 1)])]
    assert [leaves_of(tree) for tree in trees] == [[{2, 3}, 1]] * 2
    assert len({*map(outline, trees)}) == 1
    assert mapped(lambda first, second: first == second, *trees)["outer"]["b"] is True
    assert [*kind([("b", 1), ("a", 2)]).keys()] == [*mapped(id, kind([("b", 1), ("a", 2)])).keys()]  # the user's own
    assert outline(trees[0]) != outline({"outer": kind([("c", 1), ("a", {2, 3})])})


def test_a_text_is_the_same_in_every_process() -> None:
    texts = {text_of(frozenset(words)) for words in ("abcdefgh", "hgfedcba")}
    assert texts == {"frozenset[\"'a'\", \"'b'\", \"'c'\", \"'d'\", \"'e'\", \"'f'\", \"'g'\", \"'h'\"]"}
    assert text_of(object()) == text_of(object()) != text_of(1)
