"""A model that torch.compile has compiled, whole or in part, trains on each engine under the names of the plain one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.data import TensorDataset

from samestep import Job, Recipe
from samestep.engine import load, missing
from samestep.errors import Refused
from samestep.job.walk import uncompiled, without_wrappers
from samestep.tasks.inspect.load import build
from samestep.tasks.run_engine import run_engine
from samestep.training import Run
from samestep.world import World


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.linear(inputs))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(self.blocks(inputs))
        return output


def whole(net: Net, counter: CompileCounter) -> nn.Module:
    return torch.compile(net, backend=counter)  # type: ignore[return-value]


def parts(net: Net, counter: CompileCounter) -> nn.Module:
    net.blocks[1] = torch.compile(net.blocks[1], backend=counter, fullgraph=True)
    net.head = torch.compile(net.head, backend=counter)  # type: ignore[assignment]
    return net


def called(net: Net, counter: CompileCounter) -> nn.Module:
    net.compile(backend=counter)
    net.blocks[0].compile(backend=counter)
    return net


COMPILED: dict[str, Callable[[Net, CompileCounter], nn.Module]] = {
    "whole": whole,
    "parts": parts,
    "called": called,
}


def trained(engine: str, model: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """The weights after three steps."""
    job = Job(
        model=model,
        criterion=lambda output, batch: output.pow(2).mean(),
        train=TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(0))),
        forward=lambda net, batch: net(*batch.inputs),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        global_batch=4,
        ema=0.9,
    )
    return run_engine(load(engine), job, World(), Run(job, World(), 3), {})


@pytest.mark.parametrize("kind", COMPILED)
@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp", "zero", "split", "fabric", "accelerate"])
def test_every_engine_trains_what_is_compiled(kind: str, engine: str, alone: None) -> None:
    if reason := missing(load(engine), ("cpu",)):
        pytest.skip(reason)
    counter = CompileCounter()
    expected = trained("single", Net)
    torch._dynamo.reset()
    found = trained(engine, lambda: without_wrappers(COMPILED[kind](Net(), counter)))
    assert counter.frame_count
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_fsdps_hooks_in_a_full_graph_are_refused(alone: None) -> None:
    def model(full: bool) -> nn.Module:
        return without_wrappers(torch.compile(Net(), backend=CompileCounter(), fullgraph=full))  # type: ignore[arg-type]

    trained("fsdp", lambda: model(False))  # what the sentence says
    with pytest.raises(Refused, match="fullgraph"):
        trained("fsdp", lambda: model(True))


@pytest.mark.parametrize("kind", COMPILED)
def test_the_inspection_and_the_reference_compile_nothing(kind: str) -> None:
    counter = CompileCounter()
    model = uncompiled(COMPILED[kind](Net(), counter))
    model(torch.ones(2, 4)).sum().backward()
    assert not counter.frame_count
    assert model.state_dict().keys() == Net().state_dict().keys()


def test_hooks_stay() -> None:
    """A user's own, on what torch.compile returned."""
    calls: list[nn.Module] = []
    model = whole(Net(), CompileCounter())
    model.register_forward_hook(lambda module, inputs, output: calls.append(module))
    plain = uncompiled(model)
    plain(torch.ones(2, 4))
    assert calls == [plain]


JOB = """
import torch
from torch import nn
from samestep import Job, Recipe

def job():
    return Job(
        model=lambda: torch.compile(nn.Linear(2, 1), backend="eager"), criterion=lambda output, batch: output.sum(),
        train=[(torch.ones(2), 0)] * 8, optimizer=Recipe(torch.optim.SGD), global_batch=4,
    )

def wrong():
    return Job(model=lambda: 3, criterion=lambda output, batch: output, train=[0], optimizer=Recipe(torch.optim.SGD),
        global_batch=1)
"""


def test_a_loaded_job_has_plain_names(tmp_path: Path) -> None:
    file = tmp_path / "compiled_job.py"
    file.write_text(JOB)
    model = build(str(file), {}).model()
    assert [*model.state_dict()] == ["weight", "bias"]
    assert model._compiled_call_impl
    assert build(str(file), {}, compiled=False).model()._compiled_call_impl is None
    assert build(f"{file}:wrong", {}).model() == 3  # type: ignore[comparison-overlap]
