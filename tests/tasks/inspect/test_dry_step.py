"""What no engine could train is said in one sentence, before anything is launched."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, Subset, TensorDataset

from inspected_job import inspected_job
from samestep import Job, Lanes, LRSchedule, Recipe
from samestep.data.schedule import schedule_of
from samestep.data.stream import Stream
from samestep.errors import UserError
from samestep.message import message
from samestep.tasks.inspect.dry_run import dry_step

X, Y = torch.ones(12, 3), torch.zeros(12, dtype=torch.int64)


def _raise(*_: Any) -> Any:
    raise KeyError("no such column")


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Unread(TensorDataset):
    def __init__(self) -> None:
        super().__init__(X, Y)

    def __len__(self) -> int:
        raise FileNotFoundError("gone")


class Half(nn.Linear):
    """One of its layers gets no gradient."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.spare = nn.Linear(1, 1)


class Opaque:
    """A batch whose tensors nobody can find."""


def penalty(model: nn.Module, batch: Any) -> Any:
    inputs = batch.inputs.detach().requires_grad_()
    output = model(inputs)
    return output + torch.autograd.grad(output.sum(), inputs, create_graph=True)[0].norm(dim=1, keepdim=True)


NET = nn.Linear(3, 2)


class Graph(nn.Linear):
    """With a buffer that is sparse."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("adjacency", torch.ones(3, 3).to_sparse())


class Stepless(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


def accuracy() -> Any:
    from torchmetrics.classification import MulticlassAccuracy  # takes seconds

    return MulticlassAccuracy(2)


# case -> the changes to the job, or a function that makes them where they import much; and what is said: words of the
# sentence of a wrong argument, or the id and fields of a message
Changed = dict[str, Any]
CHANGES: dict[str, tuple[Changed | Callable[[], Changed], str | tuple[str, dict[str, Any]]]] = {
    "optimizer that is built": (
        lambda: {"optimizer": torch.optim.SGD(NET.parameters(), lr=0.3)},
        'optimizer=Recipe(torch.optim.SGD, {"lr": 0.3})',
    ),
    "optimizer's class alone": (
        {"optimizer": torch.optim.Adam},
        'write optimizer=Recipe(torch.optim.Adam, {"lr": 0.001})',
    ),
    "optimizer of a function": (
        {"optimizer": lambda parameters: torch.optim.Adam(parameters)},
        'optimizer=Recipe(torch.optim.AdamW, {"lr": 0.001})',
    ),
    "recipe of a name": ({"optimizer": Recipe("adam", {})}, "optimizer is a Recipe of 'adam'; "),  # type: ignore[arg-type]
    "recipe with a rate": (
        {"optimizer": Recipe(torch.optim.SGD, 0.1)},  # type: ignore[arg-type]
        "the optimizer's settings are 0.1, not a dict",
    ),
    "model that is built": (
        {"model": NET},
        "instance of Linear",
    ),
    "criterion of torch's": (
        {"criterion": nn.CrossEntropyLoss()},
        "write criterion=lambda output, batch: nn.CrossEntropyLoss()(output, batch.targets)",
    ),
    "criterion that is a function of torch's": (
        {"criterion": F.cross_entropy},
        "criterion is F.cross_entropy, and is called with (output, batch), not with the targets",
    ),
    "criterion of the targets": (
        {"criterion": lambda output, targets: F.cross_entropy(output, targets)},
        ("function_of_the_job_raised", {"function": "criterion", "hint": message("criterion_is_given_the_batch")}),
    ),
    "scheduler's class alone": (
        {"scheduler": torch.optim.lr_scheduler.StepLR},
        "scheduler is the class StepLR; it is built with the optimizer: write scheduler=LRSchedule(lambda optimizer: ",
    ),
    "sparse buffer": (
        {"model": Graph},
        ("tensor_of_the_model_is_sparse", {"name": "adjacency", "layout": "sparse_coo"}),
    ),
    "sparse rows": (
        {
            "collate": lambda samples: (
                torch.stack([x for x, _ in samples]).to_sparse(),
                torch.stack([y for _, y in samples]),
            )
        },
        ("tensor_of_a_batch_is_sparse", {"layout": "sparse_coo"}),
    ),
    "optimizer's setting": (
        {"optimizer": Recipe(torch.optim.SGD, {"speed": 1})},
        ("function_of_the_job_raised", {"function": "optimizer", "rows": None}),
    ),
    "scheduler with a metric": (
        {"scheduler": LRSchedule(torch.optim.lr_scheduler.ReduceLROnPlateau)},
        ("scheduler_needs_a_metric", {"scheduler": "ReduceLROnPlateau"}),
    ),
    "no length": ({"train": Endless()}, "train is an instance of Endless, which has no length or no rows by index"),
    "a stream that is shuffled": (
        {"train": Stream(Endless(), 3)},
        "a Stream cannot be shuffled: it is read in its order; set Job(shuffle=False)",
    ),
    "a part of a stream that is shuffled": (
        {"train": Subset(Stream(Endless(), 3), [0, 2])},
        "a Stream cannot be shuffled: it is read in its order; set Job(shuffle=False)",
    ),
    "no rows to evaluate": ({"evaluation": TensorDataset(X[:0], Y[:0])}, "the evaluation dataset has no rows"),
    "batch of another kind": ({"collate": lambda samples: Opaque()}, ("batch_holds_other_objects", {"type": "Opaque"})),
    "batch that is no number": ({"global_batch": 4.0}, "global_batch is 4.0, a float; it must be a whole number"),
    "weights of zero": ({"weight": lambda index: 0.0}, "the weights of the rows of step 0 add up to 0.0"),
    "forward that raises": (
        {"forward": _raise},
        ("function_of_the_job_raised", {"function": "forward", "rows": 4, "error": "KeyError: 'no such column'"}),
    ),
    "collate that raises": ({"collate": _raise}, ("function_of_the_job_raised", {"function": "reading", "rows": 4})),
    "model that raises": ({"model": _raise}, ("model_raised", {"error": "KeyError: 'no such column'"})),
    "model that ends the process": ({"model": lambda: sys.exit(3)}, ("model_raised", {"error": "SystemExit: 3"})),
    "model without sizes": (
        {"model": lambda: nn.Sequential(nn.LazyLinear(2))},
        ("parameter_is_lazy", {"parameter": "0.weight"}),
    ),
    "model that is none": ({"model": lambda: print}, ("model_is_no_module", {"type": "builtin_function_or_method"})),
    "optimizer without a step": ({"optimizer": Recipe(Stepless)}, ("optimizer_has_no_step", {"optimizer": "Stepless"})),
    "loss without gradient": ({"criterion": lambda *_: torch.tensor(1.0)}, ("loss_depends_on_no_parameter", {})),
    "metric that is a mean": (
        {"metrics": {"mean": lambda output, batch: output.mean()}, "evaluation": TensorDataset(X, Y)},
        "the metric 'mean' returned a tensor of shape [] for 4 rows",
    ),
    "metric that raises": (
        {"metrics": {"right": lambda output, batch: batch["y"]}, "evaluation": TensorDataset(X, Y)},
        ("function_of_the_job_raised", {"function": "metric 'right'", "rows": 4}),
    ),
    "metric without targets": (
        lambda: {
            "metrics": {"accuracy": accuracy()},
            "evaluation": TensorDataset(X, Y),
            "collate": lambda samples: {"x": torch.stack([x for x, _ in samples])},
            "forward": lambda model, batch: model(batch.data["x"]),
            "criterion": lambda output, batch: output.mean(),
        },
        ("metric_gets_no_targets", {"metric": "accuracy"}),
    ),
    "weights of zero in the evaluation": (
        {"evaluation": TensorDataset(X, Y), "evaluation_weight": lambda index: 0.0},
        ("evaluation_rows_weigh_nothing", {}),
    ),
    "clipping at a text": ({"clip_norm": "a"}, "clip_norm is 'a', a str; it must be a number"),
    "metrics in a list": (
        {"metrics": [1]},
        "metrics is an instance of list; give functions with names, as in metrics=",
    ),
    "a metric that is no function": ({"metrics": {"right": 3}}, "give functions with names, as in metrics="),
    "clipping at no number": ({"clip_norm": float("nan")}, "clip_norm is nan; it must be above 0"),
    "a length that raises": (
        {"train": Unread()},
        "the length of train, a Unread, cannot be read: FileNotFoundError: gone",
    ),
    "sparse gradient": (
        {
            "model": lambda: nn.EmbeddingBag.from_pretrained(torch.ones(5, 2), freeze=False, sparse=True),
            "forward": lambda model, batch: model(batch.inputs.long()),
        },
        ("gradient_is_sparse", {"parameter": "weight"}),
    ),
    "all rows of an output that has none": (
        {"gather_outputs": True, "forward": lambda model, batch: model(batch.inputs).mean(0)},
        ("gathered_output_has_no_rows", {}),
    ),
    "all rows of texts": (
        {"gather_outputs": True, "forward": lambda model, batch: (model(batch.inputs), "a text")},
        ("gathered_output_holds_other_objects", {"type": "str"}),
    ),
    "a state without a tensor": (
        {
            "carry_state": True,
            "order": Lanes(),
            "last": "drop",
            "forward": lambda model, batch: (model(batch.inputs), None),
        },
        ("carried_state_holds_no_tensor", {}),
    ),
    "a state that forward does not take": (
        {
            "carry_state": True,
            "order": Lanes(),
            "last": "drop",
            "forward": lambda model, batch: (model(batch.inputs + (0 if batch.state is None else batch.state)),) * 2,
        },
        ("function_of_the_job_raised", {"function": "forward with batch.state", "rows": 4}),
    ),
    "all rows in parts": (
        {"gather_outputs": True, "micro_batch": 4},
        "micro_batch is 4, and gather_outputs=True computes the loss over all rows of a step at once",
    ),
}


def _job(**changed: Any) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Half()

    usual: dict[str, Any] = {
        "model": model,
        "criterion": lambda output, batch: F.cross_entropy(output, batch.targets),
        "optimizer": Recipe(torch.optim.SGD, {"lr": 0.1}),
        "train": TensorDataset(X, Y),
        "global_batch": 8,
    }
    return Job(**(usual | changed))


def changed(case: str = "") -> Job:
    """The job that the inspection is asked about."""
    changes = CHANGES[case][0] if case else {}
    return _job(**(changes() if callable(changes) else changes))


@pytest.mark.parametrize("case", CHANGES)
def test_one_sentence(case: str) -> None:
    with pytest.raises(UserError) as raised:
        inspected_job(f"{__file__}:changed", {"case": case}, 2)
    says, said = CHANGES[case][1], raised.value.message
    if isinstance(says, str):
        assert says in str(raised.value)
    else:
        assert said.id == says[0] and {name: said.fields[name] for name in says[1]} == says[1]
    assert "\n" not in str(raised.value)


def test_a_number_of_numpy_is_a_number() -> None:
    assert _job(clip_norm=np.float32(0.5)).clip_norm == 0.5


def parses() -> Job:
    return _job(forward=lambda model, batch: json.loads("{"))


def test_the_line_is_the_users_own_where_a_library_raised() -> None:
    line = parses.__code__.co_firstlineno + 1
    with pytest.raises(UserError) as raised:
        inspected_job(f"{__file__}:parses", {}, 2)
    fields = raised.value.message.fields
    assert fields["at"] == f"{__file__}, line {line}" and fields["error"].startswith("JSONDecodeError: ")


def twofold() -> Job:
    """Trained on soft labels, and evaluated on hard ones, which the metric wants."""
    train = TensorDataset(X, F.one_hot(Y, 2).float())
    return _job(train=train, evaluation=TensorDataset(X, Y), metrics={"accuracy": accuracy()})


def test_metrics_are_tried_on_the_evaluation_alone() -> None:
    assert inspected_job(f"{__file__}:twofold", {}, 2).evaluation.metrics == {"loss": "min", "accuracy": "max"}


def test_a_parameter_without_gradient_is_named() -> None:
    found = inspected_job(f"{__file__}:changed", {}, 2)
    assert found.model.unused == ("spare.weight", "spare.bias")


def jacobian(model: nn.Module, batch: Any) -> Any:
    return model(batch.inputs) + torch.func.vmap(torch.func.jacrev(model))(batch.inputs).sum(2)


@pytest.mark.parametrize("forward", [penalty, jacobian])
def test_a_forward_may_compute_derivatives(forward: Any) -> None:
    job = _job(forward=forward)
    plain = _job()
    flop = [dry_step(each, schedule_of(each, 1), Half(), "cpu").forward_flop for each in (job, plain)]
    assert flop[0] > flop[1] > 0


def test_operations_that_cannot_be_counted_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a forward that fails while they are counted, and of one that fails always."""
    from samestep.tasks.inspect import dry_run as module

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the counter's own")

    monkeypatch.setattr(module.FlopCounterMode, "_count_flops", fails)
    job = _job()
    assert dry_step(job, schedule_of(job, 1), Half(), "cpu").forward_flop == 0
    with pytest.raises(UserError, match="KeyError"):
        dry_step(_job(forward=_raise), schedule_of(job, 1), Half(), "cpu")


def dropping() -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Dropout(0.0), nn.Linear(3, 2), nn.Dropout(0.5))

    return _job(model=model)


def test_dropout_that_drops_nothing_is_not_named() -> None:
    assert inspected_job(f"{__file__}:dropping", {}, 2).model.random_layers == ("2",)
