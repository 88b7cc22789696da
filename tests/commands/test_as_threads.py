"""samestep verify --as threads: the ranks are threads of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from budget import budget, deadline
from command import DIGITS, JOBS, TESTS, samestep
from lane_marks import CHECK, FULL
from messages import ids
from said import tells
from samestep.commands.command_options import VerifyOptions
from samestep.commands.compare import fork_servers_for
from samestep.errors import UserError
from samestep.launch import stacks
from samestep.launch.command import shared_devices
from samestep.message import plain_field
from samestep.tasks.answer import ranks_by_default
from samestep.world import World, nvidia

HANGING = f"{TESTS}/launch/hanging.py:job"


def verify(*arguments: str, out: Path) -> Any:
    return samestep("verify", *arguments, *deadline(), out=out, cwd=out.parent)


@pytest.mark.parametrize(
    "given",
    [
        {"ranks_as": "wood"},
        {"ranks_as": "threads", "launchers": "torchrun"},
        {"ranks_as": "threads", "resume": True},
        {"ranks_as": "threads", "nproc": 65},
    ],
)
def test_what_does_not_go_with_threads_is_one_sentence(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="--as"):
        VerifyOptions(**given).setup("digits")
    for device in ("auto", "cpu", "cuda", "cuda:0"):
        assert VerifyOptions(ranks_as="threads", device=device).setup("digits").as_threads


@pytest.mark.parametrize(
    ("devices", "ranks", "shared"),
    [
        (["cuda:0"], 4, ["cuda:0"] * 4),
        (["cuda:0", "cuda:1"], 3, ["cuda:0", "cuda:1", "cuda:0"]),
        (["cuda:0", "cuda:1"], 1, ["cuda:0"]),
        (["cpu"], 2, ["cpu", "cpu"]),
    ],
)
def test_threads_share_the_gpus_in_turn(devices: list[str], ranks: int, shared: list[str]) -> None:
    assert shared_devices(devices, ranks) == tuple(shared)
    environment = {"SAMESTEP_DEVICES": ",".join(shared), "WORLD_SIZE": str(ranks)}
    worlds = [World.from_env({**environment, "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
    assert [world.device for world in worlds] == shared


@pytest.mark.parametrize(
    ("device", "gpus", "servers"),
    [
        ("cpu", 1, ("ranks", "reference")),
        ("auto", 0, ("ranks", "reference")),
        ("auto", 1, ()),
        ("cuda", 1, ()),
        ("cuda:0", 1, ()),
    ],
)
def test_what_may_use_gpus_is_not_forked(
    device: str, gpus: int, servers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "visible", lambda: gpus)
    assert fork_servers_for(VerifyOptions(device=device).setup("digits")) == servers


@pytest.mark.parametrize(
    ("devices", "processes", "threads"),
    [(("cpu",), 2, 2), (("cuda:0",), 1, 2), (("cuda:0", "cuda:1", "cuda:2"), 3, 3)],
)
def test_without_a_number_threads_are_at_least_two(devices: tuple[str, ...], processes: int, threads: int) -> None:
    assert ranks_by_default(devices, as_threads=False) == processes
    assert ranks_by_default(devices, as_threads=True) == threads


@pytest.mark.full
def test_five_ranks_of_two_engines(tmp_path: Path) -> None:
    done = verify(
        *DIGITS, "--engines", "single,ddp,fsdp", "--nproc", "5", "--as", "threads", "--json", out=tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["engines"]
    assert {(row["engine"], row["verdict"], row["replicas"]) for row in rows} == {
        ("single", "same", 1),
        ("ddp", "same", 5),
        ("fsdp", "same", 5),
    }
    assert {row["launcher"] for row in rows if row["engine"] != "single"} == {"threads"}


@pytest.mark.check
def test_an_engine_of_processes_says_why(tmp_path: Path) -> None:
    done = verify("digits", "--engine", "horovod", "--nproc", "3", "--as", "threads", out=tmp_path / "out")
    assert done.returncode == 2
    assert tells(done.stderr, "engine_has_no_threads", engine="horovod") and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", [pytest.param("raises_on_rank_1", marks=CHECK), pytest.param("is_refused_on_rank_1", marks=FULL)]
)
def test_an_error_of_one_rank_is_the_one_that_processes_give(name: str, tmp_path: Path) -> None:
    said = []
    for ranks_as in ("processes", "threads"):
        line = [f"{JOBS}:{name}", "--engine", "ddp", "--nproc", "3", "--as", ranks_as, "--json"]
        done = verify(*line, out=tmp_path / ranks_as)
        (row,) = json.loads(done.stdout)["engines"]
        said.append((done.returncode, row["verdict"], row["reason"]["id"], row["reason"]["fields"].get("why")))
    assert said[0] == said[1] and said[0][0] == 1


@pytest.mark.parametrize("fault", [pytest.param("loop", marks=CHECK), pytest.param("model", marks=FULL)])
def test_a_thread_that_hangs_is_named_with_its_line(fault: str, tmp_path: Path) -> None:
    line = [HANGING, "--set", f"fault={fault}", "--engine", "ddp", "--nproc", "4", "--as", "threads", "--json"]
    done = verify(*line, "--stall", f"{budget(1.5):g}", out=tmp_path / "out")
    (row,) = json.loads(done.stdout)["engines"]
    assert row["verdict"] == "failed" and "rank 1 " in row["reason"]["english"], row
    assert "hanging.py:" in row["reason"]["english"]


@pytest.mark.check
def test_ranks_that_call_different_collectives_end_at_once(tmp_path: Path) -> None:
    line = [HANGING, "--set", "fault=branch", "--engine", "ddp", "--nproc", "4", "--as", "threads", "--json"]
    done = verify(*line, out=tmp_path / "out")
    (row,) = json.loads(done.stdout)["engines"]
    assert row["verdict"] == "failed"
    # A barrier is an all-reduce of torch's own, of one number.
    assert "ranks_sum_different_tensors" in ids(plain_field(row["reason"])), row


@pytest.mark.check
def test_at_a_deadline_each_thread_tells_its_stack(tmp_path: Path) -> None:
    line = [HANGING, "--set", "fault=model", "--engine", "ddp", "--nproc", "4", "--as", "threads", "--deadline"]
    samestep("verify", *line, f"{budget(10):g}", "--json", out=tmp_path / "out", cwd=tmp_path)
    (folder,) = (tmp_path / "out" / "launches").glob("ddp-threads-0")
    texts = [(folder / f"stack-rank{rank}.txt").read_text() for rank in range(4)]
    hung = stacks.users_frame(stacks.parse(texts[1])[0])
    assert hung and hung.function == "asleep", texts[1]
    assert all("in wait" in texts[rank] for rank in (0, 2, 3)), texts
    assert not stacks.is_alive(int((folder / "pid-rank1").read_text().partition("@")[0]))
