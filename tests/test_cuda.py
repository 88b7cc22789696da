"""What only a GPU can show. Skipped, visibly, where torch sees none."""

from __future__ import annotations

import csv
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion
from torch.utils.data import Subset

from command import TESTS, samestep
from conformance import jobs_drawn
from mutations.faults.fifth_rank import FAULTS, of_ranks_above
from mutations.plant import patched
from planting import Edit
from recorder.plant import text_of
from samestep.data.loader import Gather, batches
from samestep.data.pipeline import Span
from samestep.data.schedule import schedule_of
from samestep.engines import single
from samestep.engines.pipeline import SENDS_ANY_TENSOR
from samestep.errors import UserError
from samestep.rank.meter import Meter
from samestep.records.files import from_json
from samestep.records.findings import CheckResults, question_of
from samestep.training import Run
from samestep.world import World

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")

DRAWN = f"{Path(jobs_drawn.__file__)}:job"


def test_nothing_of_ours_waits_for_the_gpu_between_steps() -> None:
    """CUDA's own check: any `.item()`, or copy that waits, raises."""
    world, job = World(devices=("cuda:0",)), jobs_drawn.job(rows=64)
    run = Run(job, world, 60)
    model = job.model().to("cuda:0")
    optimizer = job.optimizer.build(model)
    run.register(model, optimizer)
    for batch in run.batches():
        torch.cuda.set_sync_debug_mode("error")
        loss = run.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
    torch.cuda.set_sync_debug_mode("default")
    assert len(run.observations().losses) == 60


def test_step_times_are_those_of_the_gpu() -> None:
    """Ten kernels of a known length, queued in no time: the clock of the loop would see nothing of them."""
    torch.cuda._sleep(1000)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    torch.cuda.synchronize()
    kernel_s = begin.elapsed_time(end) / 1e3
    meter = Meter(0, "cuda:0")
    meter.begin()
    for _ in range(10):
        torch.cuda._sleep(20_000_000)
        meter.step()
    step_s = meter.finish()
    assert sorted(step_s)[5] == pytest.approx(kernel_s, rel=0.2)


def test_a_loss_that_is_not_finite_is_named_with_its_step() -> None:
    meter = Meter(0, "cuda:0")
    value = torch.ones((), device="cuda:0")
    with pytest.raises(UserError, match=r"step 11.*rank 0.*nan"):  # noqa: PT012 - noticed later
        for step in range(40):
            meter.loss(value * float("nan") if step == 11 else value, step, 1.0)


def test_losses_arrive_whole_and_in_order() -> None:
    meter = Meter(0, "cuda:0")
    for step in range(1000):
        meter.loss(torch.full((), float(step), device="cuda:0"), step, 1.0)
        meter.step()
    meter.finish()
    assert meter.losses == [float(step) for step in range(1000)]


@pytest.mark.parametrize("engines", ["single,ddp"])
@pytest.mark.parametrize("job", ["digits", f"{DRAWN}"])
def test_one_gpu_takes_the_same_step(job: str, engines: str, tmp_path: Path) -> None:
    arguments = ["verify", job, "--nproc", "1", "--engines", engines, "--launchers", "all", "--device", "cuda"]
    done = samestep(*arguments, "--json", out=tmp_path / "out")
    rows = json.loads(done.stdout)["engines"]
    proven = {(row["engine"], row["launcher"], row["verdict"]) for row in rows if row["verdict"] != "unavailable"}
    assert proven >= {("single", "process", "same"), ("ddp", "torchrun", "same"), ("ddp", "spawn", "same")}
    assert {verdict for _, _, verdict in proven} == {"same"}


@pytest.mark.parametrize("rows", ["29", "32"])
def test_dataparallel_over_one_gpu_twice(rows: str, tmp_path: Path) -> None:
    """Its chunk split is its layout. Two replicas on one GPU share a generator, so no dropout here."""
    arguments = ["verify", DRAWN, "--engines", "dataparallel", "--set", f"rows={rows}", "--set", "arch=mlp"]
    done = samestep(*arguments, "--device", "cuda:0,cuda:0", "--json", out=tmp_path / "out")
    (row,) = json.loads(done.stdout)["engines"]
    assert (row["verdict"], row["replicas"]) == ("same", 2), row


ONE_GPU = ["--as", "threads", "--device", "cuda:0", "--also", "none"]
GPT = [f"{TESTS.parent}/benchmarks/one_gpu.py:gpt", "--set", "layers=4", "--set", "rows=64", "--set", "dropout=0.1"]


@pytest.mark.parametrize("ranks", ["2", "4"])
def test_ranks_as_threads_share_one_gpu(ranks: str, tmp_path: Path) -> None:
    engines = ["ddp", "fsdp", "zero", "amp", "tensor", "pipeline"]
    done = samestep(
        "verify", *GPT, "--engines", ",".join(engines), "--nproc", ranks, *ONE_GPU, "--json", out=tmp_path / "out"
    )
    rows = json.loads(done.stdout)["engines"]
    assert {row["launcher"] for row in rows} == {"threads"}
    said = {row["engine"]: row["verdict"] for row in rows}
    unlike = {"amp": "approximate"}
    if TorchVersion(torch.__version__) < SENDS_ANY_TENSOR:
        unlike["pipeline"] = "refused"  # with dropout
    assert said == dict.fromkeys(engines, "same") | unlike, done.stdout


MIXED = pytest.mark.xfail(
    reason="under torch 2.11 the optimizer of the only rank finds tensors on both; why is not known"
)


@pytest.mark.parametrize("ranks_as", [pytest.param(["--nproc", "1"], marks=MIXED), ["--nproc", "2", *ONE_GPU]])
def test_shards_wait_in_the_memory_of_the_cpu(ranks_as: list[str], tmp_path: Path) -> None:
    """With a clipped norm, which the ranks then reduce on the CPU, too."""
    line = ["verify", DRAWN, "--engine", "fsdp", "--set-engine", "offload=true", "--set", "clip_norm=0.1", *ranks_as]
    (row,) = json.loads(samestep(*line, "--json", out=tmp_path / "out").stdout)["engines"]
    assert row["verdict"] == "same", row


def test_a_fault_of_ranks_that_share_a_gpu_is_caught(tmp_path: Path) -> None:
    """As users have it: planted in the package, which plays both sides."""
    (fault,) = (fault for fault in FAULTS if fault.name == "gradients averaged over so many ranks at most")
    source = patched(of_ranks_above(1, fault), tmp_path / "planted")
    line = ["verify", *GPT, "--engine", "ddp", "--nproc", "4", *ONE_GPU, "--quick", "--json"]
    path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = samestep(*line, env={"PYTHONPATH": path}, out=tmp_path / "out")
    (row,) = json.loads(done.stdout)["engines"]
    assert (done.returncode, row["verdict"]) == (1, "differs"), row


def test_the_second_number_of_ranks_shares_the_gpu(tmp_path: Path) -> None:
    line = ["verify", "digits", "--engine", "ddp", "--nproc", "1", "--device", "cuda:0", "--also", "5", "--json"]
    done = samestep(*line, out=tmp_path / "out")
    (row,) = json.loads(done.stdout)["engines"]
    second = row["second"]
    assert (row["verdict"], second["ranks_as"], second["verdict"]) == ("same", "threads", "same"), row


SAME_ORDER = Edit("        sampler.set_epoch(epoch)\n", "")
NOT_WRAPPED = Edit(
    "model = DistributedDataParallel(model, device_ids=[device.index] if on_gpus else None)",
    "DistributedDataParallel(model, device_ids=[device.index] if on_gpus else None)",
)


@pytest.mark.parametrize(
    ("faults", "answer", "question"),
    [([], "right", ""), ([SAME_ORDER], "differs", "order"), ([NOT_WRAPPED], "differs", "gradient")],
    ids=["healthy", "same order", "not wrapped"],
)
def test_a_script_on_a_gpu_is_checked(faults: list[Edit], answer: str, question: str, tmp_path: Path) -> None:
    """Two ranks that share it by gloo."""
    (tmp_path / "train.py").write_text(text_of("shared_gpu", *faults))
    done = samestep("check", "--nproc", "2", "--json", "--out", "out", "train.py", cwd=tmp_path)
    results = from_json(CheckResults, json.loads(done.stdout))
    assert (results.answer, question_of(results)) == (answer, question), done.stdout


ON_A_GPU = """
import time, torch
held = torch.ones(2**28, device="cuda")
for _ in range(20):
    torch.cuda.synchronize()
    time.sleep(0.5)
"""


def test_the_monitor_tells_the_memory_of_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ON_A_GPU)
    done = samestep("monitor", "--out", "out", "--", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "out" / "usage.csv") as file:
        rows = list(csv.DictReader(file))
    assert max(float(row["gpu0_memory_bytes"] or 0) for row in rows) >= 2**30
    assert max(float(row["gpu0_own_memory_bytes"] or 0) for row in rows) >= 2**30


def test_more_ranks_than_gpus(tmp_path: Path) -> None:
    ranks = str(torch.cuda.device_count() + 1)
    done = samestep("run", "digits", "--nproc", ranks, "--device", "cuda", out=tmp_path / "out")
    assert done.returncode == 2
    assert f"--nproc {ranks} needs {ranks} GPUs" in done.stderr


def test_single_trains_on_the_gpu() -> None:
    job = jobs_drawn.job(rows=64, arch="conv")
    run = Run(job, World(devices=("cuda:0",)), 8)
    state = single.train(job, World(devices=("cuda:0",)), run)
    assert all(tensor.is_cuda for tensor in state.values())


LATE = 200_000_000  # cycles: a tenth of a second, in which a copy that nobody waits for is not there


def test_training_waits_for_the_copy_and_python_does_not() -> None:
    gather = Gather("cuda:0")
    wanted = torch.arange(2**20, dtype=torch.float32)
    gather([wanted])  # pinned and device memory exist
    torch.cuda.synchronize()
    with torch.cuda.stream(gather.stream):
        torch.cuda._sleep(LATE)
    coming = gather({"x": wanted, "name": "kept"})
    assert coming.copied is not None and not coming.copied.query()  # it is still under way
    data = coming.wait()
    doubled = data["x"] * 2
    assert data["name"] == "kept"
    assert not coming.copied.query()  # and this thread has not waited
    assert torch.equal(doubled.cpu(), wanted * 2)


def test_memory_that_training_still_reads_is_not_given_away() -> None:
    gather = Gather("cuda:0")
    first, second = (torch.full((2**20,), float(number)) for number in (1, 2))
    data = gather([first]).wait()
    torch.cuda._sleep(LATE)  # the training stream is behind
    read = data[0] * 1
    del data  # Python is done with it, the stream is not
    later = [gather([second]) for _ in range(4)]
    assert torch.equal(read.cpu(), first)
    assert all(torch.equal(coming.wait()[0].cpu(), second) for coming in later)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_on_the_gpu(workers: int) -> None:
    job = jobs_drawn.job(rows=29)
    job = replace(job, train=Subset(job.train, range(29)), workers=workers)
    schedule = schedule_of(job, 1)
    trace: list[Span] = []
    ours = list(batches(job, World(devices=("cuda:0",)), schedule, 9, trace=trace))
    theirs = list(batches(replace(job, workers=0), World(), schedule, 9))
    for a, b in zip(ours, theirs, strict=True):
        assert all(x.is_cuda and torch.equal(x.cpu(), y) for x, y in zip(a.data, b.data, strict=True))
        assert a.fetch_s is not None and a.fetch_s > 0
    assert {span.stage for span in trace} == {"sample", "gather", "train"}
