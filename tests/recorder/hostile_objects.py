"""Trains with objects that count, refuse or recurse wherever they are asked anything, and prints what it has trained.

python hostile_objects.py [FOLDER]     FOLDER: recorded into it; else plainly
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

ASKED = ["__eq__", "__ne__", "__hash__", "__bool__", "__len__", "__repr__", "__str__", "__iter__", "__contains__"]
ASKED += ["__reduce_ex__", "__deepcopy__"]
asked: Counter[str] = Counter()


def hostile(name: str) -> Any:
    """A method that counts its calls, and raises; each third one recurses without end."""

    def method(self: Any, *args: Any) -> Any:
        asked[name] += 1
        return method(self) if len(name) % 3 == 0 else 1 / 0

    return method


class Hostile:
    """An object that nobody may ask."""

    locals().update({name: hostile(name) for name in ASKED})

    def __getattribute__(self, name: str) -> Any:
        asked["an attribute"] += 1
        raise RuntimeError(name)


class Model(nn.Module):
    """One that hands unknown names on to what it has not yet, looks at each name, and is compared by its contents."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        nn.Module.__init__(self)  # twice, as by two base classes
        object.__setattr__(self, "beside", Hostile())  # torch itself asks it for its class
        self.inner = nn.Linear(4, 2)

    def __getattr__(self, name: str) -> Any:
        asked[f"getattr {name}"] += 1
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def __eq__(self, other: object) -> bool:
        asked["model =="] += 1
        return False

    def __hash__(self) -> int:
        asked["model hash"] += 1
        return 1

    def __bool__(self) -> bool:
        raise ZeroDivisionError

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        asked["named_parameters"] += 1
        return super().named_parameters(*args, **kwargs)

    def forward(self, batch: Any) -> Any:
        return self.inner(batch[0]), Hostile()


class Rows(Dataset[Any]):
    """A dataset that has no length until it is asked, and not then either."""

    def __init__(self) -> None:
        self.beside, self.several = Hostile(), [Hostile()] * 12

    def __len__(self) -> int:
        raise ZeroDivisionError

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), float(index)), index


class Order(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        asked["sampler iter"] += 1
        yield from range(12)

    def __len__(self) -> int:
        raise ZeroDivisionError

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    __hash__ = None  # type: ignore[assignment]


class Optimizer(torch.optim.SGD):
    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    def __bool__(self) -> bool:
        raise ZeroDivisionError

    __hash__ = None  # type: ignore[assignment]


class Closure:
    """A closure that is callable, and says that it is nothing."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __bool__(self) -> bool:
        asked["closure bool"] += 1
        return False

    def __call__(self) -> Any:
        optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss


def collated(rows: list[Any]) -> Any:
    return torch.stack([row[0] for row in rows]), Hostile()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        from samestep.recorder.recorder import Recorder
        from samestep.records.script_plan import ScriptPlan
        from samestep.world import World

        recorder = Recorder(ScriptPlan(sys.argv[1], 0.0, "train.py", steps=99), World.from_env({}), lambda _: None)
        recorder.group_operations.attach(recorder.hooks)
        recorder.attach()
    torch.manual_seed(0)
    model = Model()
    optimizer = Optimizer(model.parameters(), lr=0.01)
    loader = DataLoader(Rows(), batch_size=4, sampler=Order(), collate_fn=collated)
    for _ in range(2):
        for number, batch in enumerate(loader):
            if number:
                optimizer.step(Closure(lambda batch=batch: model(batch)[0].pow(2).mean()))
            else:
                Closure(lambda batch=batch: model(batch)[0].pow(2).mean())()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    if len(sys.argv) > 1:
        record = recorder.record("itself")
        print(f"{len(record.steps)} steps of {[len(step.micro_batches) for step in record.steps]}", file=sys.stderr)
    print(model.inner.weight.detach().flatten().tolist(), sorted(asked.items()))
