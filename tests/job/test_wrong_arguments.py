"""What users of other libraries give to a Job: each is answered by one sentence with the line to write."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, TensorDataset

from inspected_job import inspected_job
from samestep import Job, LRSchedule, Phase, Recipe, UserError
from samestep.job.checks import HINTS

X, Y = torch.ones(12, 3), torch.zeros(12, dtype=torch.int64)
ROWS = TensorDataset(X, Y)
NET = nn.Linear(3, 2)
SGD = torch.optim.SGD(NET.parameters(), lr=0.3)
STEPS = torch.optim.lr_scheduler.StepLR(SGD, 1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def job(**changes: Any) -> Job:
    usual: dict[str, Any] = {
        "model": model,
        "criterion": lambda output, batch: F.cross_entropy(output, batch.targets),
        "optimizer": Recipe(torch.optim.SGD, {"lr": 0.1}),
        "train": ROWS,
        "global_batch": 8,
    }
    return Job(**(usual | changes))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Counting:
    """A metric with a state, as torchmetrics has them."""

    def update(self, output: Any, targets: Any) -> None: ...

    def compute(self) -> float:
        return 0.0


class Frame:
    """A table whose [name] is a column, as a DataFrame."""

    iloc = None

    def __len__(self) -> int:
        return 3

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


class AsksForClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = closure()  # fails without one
        super().step()
        return loss


class ScheduleFree(torch.optim.SGD):
    """Trains other weights than it evaluates, as schedulefree's optimizers do."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class Rows:
    """Rows that are dicts, as those of Hugging Face's datasets."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input": X[index], "label": Y[index]}


# what is given -> words of the sentence
VALUES: list[tuple[dict[str, Any], str]] = [
    ({"train": DataLoader(ROWS, 4)}, "train=loader.dataset"),
    ({"evaluation": DataLoader(ROWS, 4)}, "evaluation=loader.dataset"),
    ({"train": (X, Y)}, "train=TensorDataset(inputs, targets)"),
    ({"train": [X.numpy(), Y.numpy()]}, "train=TensorDataset(inputs, targets)"),
    ({"evaluation": (X, Y)}, "evaluation=TensorDataset(inputs, targets)"),
    ({"train": {"train": ROWS, "test": ROWS}}, 'train=data["train"]'),
    ({"evaluation": {"train": ROWS, "eval": ROWS}}, 'evaluation=data["eval"]'),
    ({"train": {}}, "TensorDataset"),
    ({"train": "data/train"}, "ImageFolder"),
    ({"train": TensorDataset}, "train=TensorDataset(…)"),
    ({"train": Frame()}, "TensorDataset(torch.tensor(frame[columns]"),
    ({"train": Endless()}, "samestep.Stream"),
    ({"train": (row for row in ROWS)}, "samestep.Stream"),
    ({"train": iter(ROWS)}, "samestep.Stream"),
    ({"train": None}, "train is None"),
    ({"train": {1, 2}}, "train is"),
    ({"train": 5}, "train is 5"),
    ({"train": lambda: ROWS}, "train is a function"),
    ({"train": []}, "no rows"),
    ({"evaluation": []}, "no rows"),
    ({"model": NET}, "def model()"),
    ({"model": None}, "def model()"),
    ({"model": "resnet18"}, "def model()"),
    ({"optimizer": SGD}, "Recipe(torch.optim.SGD"),
    ({"optimizer": torch.optim.SGD}, "Recipe(torch.optim.SGD"),
    ({"optimizer": "adam"}, "Recipe(torch.optim.AdamW"),
    ({"optimizer": None}, "Recipe("),
    ({"optimizer": (torch.optim.SGD, {"lr": 0.1})}, "Recipe("),
    ({"optimizer": Recipe(SGD)}, "Recipe(torch.optim.SGD"),  # type: ignore[arg-type]
    ({"scheduler": STEPS}, "scheduler=LRSchedule(lambda optimizer"),
    ({"scheduler": torch.optim.lr_scheduler.StepLR}, "scheduler=LRSchedule(lambda optimizer"),
    ({"scheduler": "cosine"}, "scheduler=LRSchedule(lambda optimizer"),
    ({"scheduler": LRSchedule(STEPS)}, "LRSchedule(lambda optimizer"),  # type: ignore[arg-type]
    ({"scheduler": LRSchedule(lambda o: STEPS, every="batch")}, "'step', 'epoch'"),  # type: ignore[arg-type]
    ({"criterion": nn.CrossEntropyLoss()}, "nn.CrossEntropyLoss()(output, batch.targets)"),
    ({"criterion": nn.CrossEntropyLoss}, "nn.CrossEntropyLoss()(output, batch.targets)"),
    ({"criterion": "cross_entropy"}, "criterion=lambda output, batch"),
    ({"criterion": None}, "criterion=lambda output, batch"),
    ({"metrics": Counting()}, "metrics={'Counting': metric}"),
    ({"metrics": [Counting()]}, "metrics={'accuracy'"),
    ({"metrics": "accuracy"}, "metrics={'accuracy'"),
    ({"metrics": {"accuracy": "accuracy"}}, "a metric is 'accuracy'"),
    ({"metrics": {"counting": Counting()}}, "reset()"),
    ({"metrics": {"loss": lambda output, batch: 0}}, "another name"),
    ({"metrics": lambda output, batch: 0}, "metrics={'accuracy'"),
    ({"weight": torch.ones(12)}, "weight=lambda index"),
    ({"evaluation_weight": [1.0] * 12}, "evaluation_weight=lambda index"),
    ({"collate": "pad"}, "collate=lambda samples"),
    ({"augment": "flip"}, "augment=lambda sample, generator"),
    ({"forward": None}, "forward=lambda model, batch"),
    ({"on_step": "print"}, "on_step=lambda info"),
    ({"on_evaluation": ["print"]}, "on_evaluation=lambda step, metrics"),
    ({"order": RandomSampler(ROWS)}, "Weighted, ByLength, Lanes()"),
    ({"order": "random"}, "Weighted, ByLength, Lanes()"),
    ({"phases": [{"name": "g"}]}, "Phase("),
    ({"phases": "generator"}, "Phase("),
    ({"global_batch": 0}, "over all ranks"),
    ({"global_batch": -8}, "above 0"),
    ({"global_batch": 8.0}, "whole number"),
    ({"global_batch": "8"}, "whole number"),
    ({"global_batch": None}, "whole number"),
    ({"global_batch": True}, "whole number"),
    ({"global_batch": [8]}, "whole number"),
    ({"epochs": None}, "whole number"),
    ({"epochs": 1.5}, "whole number"),
    ({"max_steps": 0}, "above 0"),
    ({"seed": None}, "whole number"),
    ({"seed": "a"}, "whole number"),
    ({"micro_batch": "auto"}, "whole number"),
    ({"clip_norm": "1"}, "a number"),
    ({"workers": -1}, "workers is -1"),
    ({"workers": "auto"}, "workers is 'auto'"),
    ({"prefetch": 0}, "above 0"),
    ({"ema": 1.5}, "between 0 and 1"),
    ({"ema": True}, "between 0 and 1"),
    ({"ema": "0.9"}, "between 0 and 1"),
    ({"last": True}, "'keep' or 'drop'"),
    ({"save": "best"}, "'all' or 'trainable'"),
    ({"parallel": ["blocks.0"]}, 'parallel={"blocks.*.up"'),
    ({"parallel": "colwise"}, "parallel is 'colwise'"),
    ({"parallel": {"0": 3}}, "the styles are colwise"),
    ({"parallel": {3: "colwise"}}, "the key 3"),
    ({"parallel": {"0": "colwize"}}, "did you mean 'colwise'"),
]


@pytest.mark.parametrize(("changes", "words"), VALUES, ids=[words for _, words in VALUES])
def test_a_value_of_another_kind_is_answered_by_the_line_to_write(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as raised:
        job(**changes)
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", [name for names in HINTS.values() for name in names.split()])
def test_a_name_of_another_library_is_answered_by_the_name_here(name: str) -> None:
    with pytest.raises(UserError, match=f"no argument '{name}'") as raised:
        job(**{name: 1})
    assert "known are" not in str(raised.value)


# what is typed -> words of the sentence
LINES: list[tuple[Callable[[], Any], str]] = [
    (lambda: job(evaluatoin=ROWS), "did you mean 'evaluation'"),
    (lambda: job(zzz=1), "known are: model"),
    (lambda: Recipe(torch.optim.SGD, lr=0.1), 'Recipe(SGD, {"lr": 0.1})'),  # type: ignore[call-arg]
    (
        lambda: LRSchedule(torch.optim.lr_scheduler.StepLR, step_size=3),  # type: ignore[call-arg]
        "LRSchedule(lambda optimizer: StepLR(optimizer, step_size=3))",
    ),
]


@pytest.mark.parametrize(("line", "words"), LINES, ids=[words for _, words in LINES])
def test_a_line_of_another_kind_is_answered_by_the_right_line(line: Callable[[], Any], words: str) -> None:
    with pytest.raises(UserError) as raised:
        line()
    assert words in str(raised.value)


# Wrong in a way that only the rows and the model show.
INSPECTED: dict[str, tuple[dict[str, Any], str]] = {
    "dict rows": ({"train": Rows()}, "forward=lambda model, batch: model(**batch.data)"),
    "targets of dict rows": (
        {"train": Rows(), "forward": lambda model, batch: model(batch.data["input"])},
        "batch.data",
    ),
    "a schedule-free optimizer": (
        {"optimizer": Recipe(ScheduleFree, {"lr": 0.1})},
        "ScheduleFree has train() and eval()",
    ),
    "a closure that is not declared": ({"optimizer": Recipe(AsksForClosure, {"lr": 0.1})}, "def step(self, closure)"),
}
RIGHT: dict[str, dict[str, Any]] = {
    "a list of pairs": {"train": [*zip(X, Y)]},
    "a tuple of pairs": {"train": (*zip(X, Y),)},
    "pairs of arrays": {"train": [*zip(X.numpy(), Y.numpy())]},
    "a subset": {"train": Subset(ROWS, range(9))},
    "a tensor": {"train": X, "criterion": lambda output, batch: output.mean()},
    "an array": {"train": X.numpy(), "criterion": lambda output, batch: output.mean()},
    "dict rows": {
        "train": Rows(),
        "forward": lambda model, batch: model(batch.data["input"]),
        "criterion": lambda output, batch: F.cross_entropy(output, batch.data["label"]),
    },
    "a number of numpy": {"clip_norm": np.float32(0.5)},
    "an optimizer of one's own": {"optimizer": Recipe(type("Mine", (torch.optim.SGD,), {}), {"lr": 0.1})},
    "no layers to split": {"parallel": {}},
    "a scheduler's class": {"scheduler": LRSchedule(torch.optim.lr_scheduler.LinearLR)},
}


def inspected(case: str, right: bool) -> Job:
    """The job that the inspection is asked about."""
    return job(**(RIGHT[case] if right else INSPECTED[case][0]))


@pytest.mark.parametrize("case", INSPECTED)
def test_rows_and_steps_of_another_kind_are_answered_by_the_line_to_write(case: str) -> None:
    with pytest.raises(UserError) as raised:
        inspected_job(f"{__file__}:inspected", {"case": case, "right": "no"}, 2)
    assert INSPECTED[case][1] in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("case", RIGHT)
def test_odd_and_right(case: str) -> None:
    assert inspected_job(f"{__file__}:inspected", {"case": case, "right": "yes"}, 2).refusals.of_replicas == {
        1: None,
        2: None,
    }


def test_a_job_is_copied_and_pickled_as_before() -> None:
    recipe = Recipe(torch.optim.SGD, {"lr": 0.1})
    assert copy.copy(job(epochs=3)).epochs == 3 and pickle.loads(pickle.dumps(recipe)) == recipe
    assert copy.deepcopy(Phase("g", "0", F.cross_entropy, recipe)).optimizer == recipe
