"""A dataset's fingerprint: what it notices, and that looking changes nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from budget import budget
from samestep import ImageFolder, Job, Recipe, Stream
from samestep.data import fingerprint as module
from samestep.data.fingerprint import digest_of, fingerprint, is_same_row, sampled_rows


def job(train: Any, **more: Any) -> Job:
    return Job(
        model=lambda: nn.Linear(3, 2),
        criterion=lambda output, batch: output.mean(),
        optimizer=Recipe(torch.optim.SGD, {"lr": 1.0}),
        train=train,
        global_batch=4,
        shuffle=not isinstance(train, Stream),
        **more,
    )


STUCK = sampled_rows(100)[2]


class Rows(Dataset[Any]):
    """Rows that are made in one of several ways, and a count of the reads in this process."""

    def __init__(self, how: str = "", count: int = 100, added: float = 0.0) -> None:
        self.how, self.count, self.added = how, count, added
        self.own, self.reads = np.random.default_rng(0), 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        row = torch.full((3,), index + self.added)
        if self.how == "random":
            row = row + torch.rand(3) + random.random() + float(np.random.rand())
        if self.how == "own generator":
            row = row + self.own.random()
        if self.how == "image":
            return Image.fromarray(np.full((2, 2, 3), index + int(self.added), np.uint8))
        if self.how == "slow":
            time.sleep(0.005)
        if self.how == "stuck" and index == STUCK:
            time.sleep(budget())
        if self.how == "broken":
            raise ValueError("a bad shard")
        return row, index


@pytest.mark.parametrize("how", ["", "random", "image"])
def test_other_values_are_noticed_and_the_same_are_not(how: str) -> None:
    """Random numbers are the same in each look."""
    here = fingerprint(job(Rows(how)))
    assert len(here.rows) == 16 and here.changing == 0
    assert fingerprint(job(Rows(how))) == here
    other = fingerprint(job(Rows(how, added=1.0))).rows
    assert not {*other.values()} & {*here.rows.values()} or how == ""
    assert all(other[row] != here.rows[row] for row in other)


def test_rounding_is_no_other_row_and_a_changed_number_is() -> None:
    row = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))
    rounded, changed, moved = row.round(decimals=1), row.clone(), row.roll(1)
    changed[1, 5, 7] += 0.1
    digest = digest_of((row, 3))
    assert is_same_row(digest, digest_of((row * (1 + 1e-7), 3)))
    others = [(rounded, 3), (changed, 3), (moved, 3), (row, 4), (row.flatten(), 3), (row * torch.nan, 3)]
    assert not any(is_same_row(digest, digest_of(other)) for other in others)


def test_rows_that_change_are_left_out_and_looking_draws_nothing() -> None:
    dataset, states = Rows("own generator"), (random.getstate(), torch.get_rng_state().tolist())
    seen = fingerprint(job(dataset))
    assert (seen.rows, seen.changing) == ({}, 16)
    assert dataset.reads == 0 and dataset.own.random() == np.random.default_rng(0).random()
    assert (random.getstate(), torch.get_rng_state().tolist()) == states


def test_of_a_slow_dataset_the_same_rows_are_looked_at() -> None:
    assert fingerprint(job(Rows("slow"))) == fingerprint(job(Rows()))


def test_a_row_that_is_never_read_is_not_waited_for_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "SILENT_S", budget(1))
    assert [*fingerprint(job(Rows("stuck"))).rows] == [0, 99]
    assert "2 samples" in capsys.readouterr().err


def test_an_error_is_the_trainings_own() -> None:
    assert fingerprint(job(Rows("broken"))).rows == {}


@pytest.mark.parametrize("count", [1, 2, 5, 16, 17, 1600, 10**9])
def test_the_first_and_the_last_row_come_first(count: int) -> None:
    rows = sampled_rows(count)
    assert {rows[0], rows[:2][-1]} == {0, count - 1}
    assert len({*rows}) == len(rows) == min(count, 16) and max(rows) < count


def test_tensors_are_read_here_and_their_order_counts() -> None:
    tensors = TensorDataset(torch.randn(40, 3), torch.arange(40))
    here, shuffled = (fingerprint(job(Subset(tensors, rows))) for rows in (range(40), torch.randperm(40).tolist()))
    assert len(here.rows) == 16 and here.rows != shuffled.rows


def test_a_stream_is_read_at_its_beginning() -> None:
    class Numbers:
        def __iter__(self) -> Iterator[Any]:
            yield from (torch.tensor([float(number)]) for number in range(1000))

    assert [*fingerprint(job(Stream(Numbers(), length=1000))).rows] == [0, 1, 2, 3]


def test_what_collate_and_augment_make_of_rows_counts() -> None:
    plain, doubled = (
        fingerprint(job(Rows(), collate=lambda rows, by=by: torch.stack([row[0] * by for row in rows])))
        for by in (1, 2)
    )
    assert plain.rows == doubled.rows and plain.collated != doubled.collated
    drawn = [
        fingerprint(job(Rows(), augment=lambda row, generator: (row[0] + torch.rand(3, generator=generator), row[1])))
        for _ in range(2)
    ]
    assert drawn[0].collated == drawn[1].collated != ""


def test_labels_of_an_image_folder_wherever_it_is(tmp_path: Path) -> None:
    for place, names in {"a": ("cat", "dog"), "b": ("cat", "dog"), "c": ("cat", "eel"), "d": ("cat", "dog")}.items():
        for number, name in enumerate(names):
            (tmp_path / place / name).mkdir(parents=True)
            for image in range(2 + (place == "d" and not number)):
                Image.new("RGB", (4, 4), (40 * image, 0, 0)).save(tmp_path / place / name / f"{image}.png")
    a, b, c, d = (fingerprint(job(ImageFolder(tmp_path / place))) for place in "abcd")
    assert a == b and a.labels
    assert len({a.labels, c.labels, d.labels}) == 3


def test_a_value_without_end_hides_no_other_value() -> None:
    row = torch.tensor([float("nan"), 1.0, float("inf"), 2.0])
    assert is_same_row(digest_of(row), digest_of(row.clone()))
    for place, value in ((1, 1.5), (0, 0.0), (2, -float("inf")), (2, float("nan"))):
        changed = row.clone()
        changed[place] = value
        assert not is_same_row(digest_of(row), digest_of(changed)), (place, value)
