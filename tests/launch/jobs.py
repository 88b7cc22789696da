"""Jobs for tests of how processes start and end."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from samestep import Batch, Job, Recipe, UserError

NORMAL_EXIT = "a rank has ended through the interpreter's exit, where gloo's threads abort one in three"
if "RANK" in os.environ:
    atexit.register(print, NORMAL_EXIT, flush=True)


def _job(train: Any, **changes: Any) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    fields: dict[str, Any] = {
        "model": model,
        "criterion": lambda output, batch: F.cross_entropy(output, batch.targets),
        "optimizer": Recipe(torch.optim.SGD, {"lr": 0.1}),
        "train": train,
        "global_batch": 8,
        "epochs": 2,
    }
    return Job(**fields | changes)


def _rows(count: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.arange(count) % 3)


class Slow(Dataset[Any]):
    """A minute of training, unless somebody ends it."""

    def __init__(self, rows: int = 4000) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.02)
        return torch.ones(4), torch.tensor(index % 3)


def quick() -> Job:
    return _job(_rows())


def prints_its_interfaces() -> Job:
    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        print(f"gloo {os.environ.get('GLOO_SOCKET_IFNAME')}, NCCL {os.environ.get('NCCL_SOCKET_IFNAME')}")
        return F.cross_entropy(output, batch.targets)

    return _job(_rows(), criterion=criterion)


def slow_briefly(workers: int = 0) -> Job:
    return _job(Slow(96), epochs=1, workers=workers)


def slow_for_a_while() -> Job:
    return _job(Slow(1000), epochs=1)


def slow_until_requeued() -> Job:
    """Takes minutes in the first launch of a Slurm job, and a moment in the next. It has an evaluation, for --best."""

    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        time.sleep(0.2 if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" else 0)
        return F.cross_entropy(output, batch.targets)

    return _job(_rows(), evaluation=_rows(16), criterion=criterion, epochs=400)


def meets_three_times(waits: bool = True) -> Job:
    """In float64. waits: the last rank enters step 6 only when machines have met twice, and step 12 at the third time.

    The others wait for it in a collective, where they notice that it is killed.
    """

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 3).double()

    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
        while waits and last and int(os.environ.get("SAMESTEP_ATTEMPT", "0")) < batch.micro_batch.step // 6:
            time.sleep(0.05)
        return F.cross_entropy(output, batch.targets)

    rows = _rows(30)
    exact = TensorDataset(rows.tensors[0].double(), rows.tensors[1])
    optimizer = Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    return _job(exact, model=model, criterion=criterion, optimizer=optimizer, epochs=4)


def slow(workers: int = 0) -> Job:
    return _job(Slow(), workers=workers)


def with_a_child() -> Job:
    """Starts a process of its own, and does not end it."""
    subprocess.Popen(["sleep", "987"])
    return _job(Slow())


def leaves_a_daemon(mark: str = "") -> Job:
    """Starts a process in a session of its own, which does not know who started it, and leaves it."""
    subprocess.Popen(["sleep", "986", mark][: 3 if mark else 2], start_new_session=True, env={})
    return _job(_rows())


def raises_on_rank_1() -> Job:
    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        if os.environ.get("RANK") == "1" and batch.micro_batch.step == 3:
            raise RuntimeError("the data of step 3 is bad")
        return F.cross_entropy(output, batch.targets)

    return _job(_rows(), criterion=criterion)


def is_refused_on_rank_1() -> Job:
    """The file REFUSALS counts how often."""

    def refused(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        if os.environ.get("RANK") == "1":
            with open(os.environ["REFUSALS"], "a") as file:
                file.write("1")
            raise UserError("the labels begin at 1; let them begin at 0")
        return F.cross_entropy(output, batch.targets)

    return _job(_rows(), criterion=refused)


def leaves_on_rank_1() -> Job:
    """Rank 1 ends without a word."""

    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        if os.environ.get("RANK") == "1" and batch.micro_batch.step == 3:
            os._exit(7)
        return F.cross_entropy(output, batch.targets)

    return _job(_rows(), criterion=criterion)


def times_out_on_rank_1() -> Job:
    """With words of its own that a lost connection has too."""

    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        if os.environ.get("RANK") == "1" and batch.micro_batch.step == 3:
            raise RuntimeError("timeout: the feature server reset the connection")
        return F.cross_entropy(output, batch.targets)

    return _job(_rows(), criterion=criterion)


def hangs_on_rank_1() -> Job:
    """Hangs in step 3. The steps before are slow, so that the progress is written first."""

    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        if os.environ.get("RANK") == "1":
            time.sleep(0.6 if batch.micro_batch.step < 3 else 3600)
        return F.cross_entropy(output, batch.targets)

    return _job(_rows(), criterion=criterion)


def dies_once() -> Job:
    """Rank 1 is killed in step 3, unless torchrun has started it again."""

    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first and os.environ.get("RANK") == "1" and batch.micro_batch.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(output, batch.targets)

    return _job(_rows(), criterion=criterion)


def eats_memory() -> Job:
    """Rank 1 fills what memory there is."""
    eaten = []

    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        while os.environ.get("RANK") == "1" and batch.micro_batch.step == 3:
            eaten.append(torch.ones(2**22))
        return F.cross_entropy(output, batch.targets)

    return _job(_rows(), criterion=criterion)


def evaluates_slowly() -> Job:
    """Some two seconds of training, and as much of evaluation."""

    class Drowsy(Slow):
        def __len__(self) -> int:
            return 160

    return _job(Drowsy(), evaluation=Drowsy(), epochs=1)


def becomes_nan() -> Job:
    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        loss = F.cross_entropy(output, batch.targets)
        return loss * float("nan") if batch.micro_batch.step == 37 else loss

    return _job(_rows(), criterion=criterion, epochs=40)


def no_parameters() -> Job:
    return _job(_rows(), model=nn.Identity)


def not_a_scalar() -> Job:
    return _job(_rows(), criterion=lambda output, batch: F.cross_entropy(output, batch.targets, reduction="none"))


def unseeded() -> Job:
    return _job(_rows(), model=lambda: nn.Linear(4, 3))


def one_row() -> Job:
    """BatchNorm over single numbers: 17 rows in batches of 8 leave one row for the last."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    return _job(_rows(17), model=model)


def raises_when_built() -> Job:
    raise KeyError("data")


def returns_a_model() -> nn.Module:
    return nn.Linear(4, 3)


def needs_data(data: str, lr: float = 0.1) -> Job:
    return _job(_rows())


def float32_only() -> Job:
    """A criterion with a float32 table inside: the model fits in float64, the job does not."""
    table = torch.eye(3)

    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return -(output.log_softmax(1) @ table)[torch.arange(len(batch.targets)), batch.targets].mean()

    return _job(_rows(29), criterion=criterion)
