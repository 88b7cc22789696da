"""What a script draws for its rows: where a generator counts, and where it does not."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from samestep.recorder.random_numbers import Randoms
from samestep.recorder.row_draws import RowDraws, drawn_twisters, generators, twisters


@pytest.mark.parametrize(("drawn", "count"), [(0, 0), (2, 0), (8, 1), (700, 1), (3000, 1)])
def test_a_generator_counts_where_it_gives_a_number_for_each_row(drawn: int, count: int) -> None:
    before = twisters()
    for _ in range(drawn):
        np.random.randint(0, 2**31)
    assert len(drawn_twisters(before, 8)) == count
    before = twisters()
    for _ in range(drawn):
        random.getrandbits(32)
    assert len(drawn_twisters(before, 8)) == count


def test_a_generator_that_is_seeded_anew_does_not_count() -> None:
    before = twisters()
    np.random.seed(1)
    random.seed(1)
    assert not drawn_twisters(before, 8)


def test_the_generators_of_a_dataset_are_found_in_its_transforms() -> None:
    class Held:
        def __init__(self, **held: object) -> None:
            self.__dict__.update(held)

    flip = Held(rng=random.Random(1), system=random.SystemRandom())
    dataset = Held(dataset=Held(transform=Held(transforms=[flip])), rng=np.random.default_rng(2))
    assert len([*generators(dataset)]) == 1
    assert len([*generators(Held(transform=Held(transforms=[flip]), rng=np.random.default_rng(2)))]) == 2


def masks(randoms: Randoms) -> None:
    F.dropout(torch.ones(6))


def noise(randoms: Randoms) -> None:
    randoms.draw(lambda: torch.randn(4, 2))


def a_choice_for_all_rows(randoms: Randoms) -> None:
    randoms.draw(lambda: torch.rand(1))


def an_order_of_all_ranks(randoms: Randoms) -> None:
    randoms.share(randoms.draw(lambda: torch.randperm(8)))


@pytest.mark.parametrize(
    ("draws", "first"),
    [
        ([], None),
        ([an_order_of_all_ranks, a_choice_for_all_rows], None),
        ([noise, an_order_of_all_ranks], 0),
        ([an_order_of_all_ranks, a_choice_for_all_rows, noise], 2),
        ([an_order_of_all_ranks, masks], 1),
    ],
)
def test_what_ranks_are_to_have_in_common_is_no_noise_of_theirs(
    draws: list[Callable[[Randoms], None]], first: int | None
) -> None:
    randoms, states = Randoms(), list[str]()
    before = randoms.before(0)
    for draw in draws:
        states.append(Randoms().before(0))
        draw(randoms)
    randoms.after(0, before)
    assert randoms.record.draws == ["" if first is None else states[first]]


@pytest.mark.parametrize(("cut", "noted"), [(lambda x: x[:, :3], False), (lambda x: x, True), (lambda x: x + 1, True)])
def test_a_piece_of_drawn_numbers_is_no_noise_of_its_rows(
    tmp_path: Path, cut: Callable[[torch.Tensor], torch.Tensor], noted: bool
) -> None:
    draws = RowDraws(tmp_path, 0, Randoms())
    draws.begin()
    drawn = draws._draw(functools.partial(torch.randn, 4, 6))
    draws.train(0, 4, ((cut(drawn),), {}))
    assert bool(draws.beside[0]) == noted
