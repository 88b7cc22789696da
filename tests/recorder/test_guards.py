"""What samestep's own code raises in a training never ends it, and samestep is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from budget import budget
from command import samestep
from lane_marks import in_turn
from said import tells
from samestep.errors import UserError
from samestep.message import Message, message
from samestep.rank.hooks import Hooks
from samestep.recorder.guards import Guard, fault_message
from samestep.report.language import text

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

def planted(*args, **kwargs):
    raise KeyError("planted")

MODULE, OWNER, NAME = {plant}
if MODULE in sys.modules:
    module = sys.modules[MODULE]
    setattr(getattr(module, OWNER) if OWNER else module, NAME, planted)
dist.init_process_group("gloo")
torch.manual_seed(0)
rows = torch.randn(16, 4)
data = TensorDataset(rows, rows.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{watch}
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    total = torch.ones(1)
    dist.all_reduce(total)
    if not x.isfinite().all():
        torch.distributed.broadcast(total, src=0)
print("weights", model.module.weight.tolist(), flush=True)
dist.destroy_process_group()
"""
NOTHING = "", "", ""
RECORDER, MONITORED = "samestep.recorder.", "samestep.recorder.monitored_rank"
RECORDED = {
    "optimizer step": (RECORDER + "recorder", "Recorder", "_end_step"),
    "loader": (RECORDER + "loaders", "Loaders", "_read"),
    "loss": (RECORDER + "recorder", "", "scalar_of"),
    "gradient": (RECORDER + "window", "Window", "add"),
    "clipping": (RECORDER + "recorder", "Recorder", "_record_clip"),
    "forward": (RECORDER + "recorder", "Recorder", "_begin_forward"),
    "collective": (RECORDER + "call_sites", "", "members"),
    "construction": (RECORDER + "call_sites", "CallSites", "_chain"),
}
OBSERVED = {
    "optimizer step": (MONITORED, "heartbeat", "step"),
    "loader": (MONITORED, "heartbeat", "loaded"),
    "process group": (MONITORED, "MonitoredRank", "_open"),
}


FAILED = {"identity": "samestep_has_failed", "kind": "KeyError", "text": "'planted'"}


def script(folder: Path, plant: tuple[str, str, str], watch: str = "") -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(plant=plant, watch=watch))
    return path


def launched(path: Path, ranks: int = 1) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(path)]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=budget(), check=False)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the training prints that nothing observes."""
    done = run(sys.executable, *launched(script(tmp_path_factory.mktemp("plain"), NOTHING)))
    assert done.returncode == 0 and done.stdout.startswith("weights"), done.stderr
    return done.stdout


def lanes(kinds: dict[str, Any], first: int) -> list[Any]:
    """Returns every fourth kind for make check, from the first on, and the others for make full."""
    return [pytest.param(kinds[kind], id=kind, marks=in_turn(4, n, -first)) for n, kind in enumerate(kinds)]


@pytest.mark.parametrize("plant", lanes(RECORDED, 1))
def test_a_watched_training_goes_on(plant: tuple[str, str, str], plain: str, tmp_path: Path) -> None:
    watch = "import samestep; samestep.watch(model, optimizer, loader, steps=4)"
    # What the recorder imports is there before anything is planted.
    path = script(tmp_path, plant, watch)
    path.write_text(f"import samestep.recorder.watch\n{path.read_text()}")
    done = run(sys.executable, *launched(path))
    assert done.returncode == 0 and done.stdout == plain, done.stderr
    assert tells(done.stderr, **FAILED), done.stderr


@pytest.mark.parametrize("plant", lanes({"none": NOTHING, **OBSERVED}, 2))
def test_a_monitored_training_goes_on(plant: tuple[str, str, str], plain: str, tmp_path: Path) -> None:
    path = script(tmp_path, plant)
    done = samestep("monitor", "--", sys.executable, *launched(path), out=tmp_path / "out")
    assert done.returncode == 0 and plain in done.stdout, done.stdout + done.stderr
    assert ("samestep monitor: " in done.stderr) == tells(done.stderr, **FAILED) == (plant != NOTHING), done.stderr


@pytest.mark.parametrize("plant", lanes(RECORDED, 0))
def test_a_check_names_samestep(plant: tuple[str, str, str], tmp_path: Path) -> None:
    done = samestep("check", "--nproc", "2", str(script(tmp_path, plant)), out=tmp_path / "out")
    said = done.stdout + done.stderr
    assert done.returncode == 3, said
    assert tells(said, **FAILED), said
    assert "train.py:" not in said


@pytest.mark.check
def test_a_check_of_the_same_script_is_right(tmp_path: Path) -> None:
    done = samestep("check", "--nproc", "2", str(script(tmp_path, NOTHING)), out=tmp_path / "out")
    assert "samestep itself" not in done.stdout + done.stderr and done.returncode != 3, done.stdout + done.stderr


class Torch:
    """A place that is patched."""

    calls = 0

    def add(self, number: int) -> int:
        self.calls += 1
        return 10 // number


def patched(ours: Any) -> tuple[Guard, Any]:
    """Returns a guard, and a place that a patch stands at: ours("before"), the original, ours("after")."""
    guard, owner = Guard(), type("Owner", (Torch,), {})

    def new_add(original: Any, self: Any, number: int) -> Any:
        ours("before")
        try:
            return original(self, number)
        finally:
            ours("after")

    Hooks(guard).attach(owner, "add", new_add)
    return guard, owner()


def raising(when: str, error: type[Exception] = KeyError) -> Any:
    def ours(now: str) -> None:
        if now == when:
            raise error("planted")

    return ours


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_call_is_made_once_and_gives_what_it_gives(when: str) -> None:
    guard, thing = patched(raising(when))
    faults: list[Exception] = []
    guard.begin(faults.append)
    assert thing.add(2) == 5 and thing.calls == 1
    assert thing.add(5) == 2 and thing.calls == 2  # and nothing of ours runs any more
    assert [type(fault) for fault in faults] == [KeyError]


@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_what_the_original_raises_passes(when: str) -> None:
    guard, thing = patched(raising(when))
    with pytest.raises(ZeroDivisionError):
        thing.add(0)
    assert thing.calls == 1 and (guard.fault is None) == (when == "never")


def test_what_is_meant_for_the_user_passes() -> None:
    guard, thing = patched(raising("before", UserError))
    with pytest.raises(UserError):
        thing.add(2)
    assert guard.fault is None


def test_a_hook_raises_nothing_and_is_then_silent() -> None:
    guard, called = Guard(), list[int]()

    def ours(number: int) -> None:
        called.append(number)
        raise KeyError("planted")

    hook = guard.hook(ours)
    hook(1)
    hook(2)
    assert called == [1] and isinstance(guard.fault, KeyError)


def test_the_sentence_is_the_same_where_there_are_no_sentences() -> None:
    guard, sentences = Guard(), list[Message]()
    guard.begin(lambda fault: sentences.append(fault_message(fault)))
    guard.hook({}.__getitem__)("no such key")
    (said,) = sentences
    assert text(message(said.id, **said.fields)) == said.english and "samestep/recorder/guards.py:" in said.english
