"""What other machines, and strangers, may send to a doctor and have it do; every hostile peer: benchmarks/."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from peers import TOKEN, meet

from budget import budget, wait_until
from samestep import launch
from samestep.commands.doctor import APART, _role_of_rank, report_of
from samestep.doctor import throughput
from samestep.doctor import token as tokens
from samestep.doctor.connection import Lost
from samestep.doctor.fleet import (
    MOST_GREETING,
    Arrivals,
    LocalMachine,
    RemoteMachine,
    connect,
    remote_machines,
    serve,
    why_refused,
)
from samestep.doctor.machine import LaunchInfo, Trial
from samestep.doctor.probes import PROBES, collective
from samestep.doctor.records import Answer, Greeting, Probed, Request
from samestep.errors import UserError
from samestep.launch.outer_launcher import launched_rank
from samestep.launch.rendezvous_address import rendezvous_of
from samestep.world import network

OTHER_TOKEN = "another token of a doctor"
INFO = LaunchInfo(nproc=2, nnodes=3, master="h0", port=29500)
PORTS = (("10.0.0.1", 40001), ("10.0.0.2", 40002))
TRIAL = Trial(
    "10.0.0.1", 41000, size=6, local_size=2, first_rank=2, variables={"GLOO_SOCKET_IFNAME": "eth0"}, wait_s=20.0
)


def start(**changes: object) -> Request:
    return Request("start", trial=replace(TRIAL, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "request_",
    [
        *(
            start(variables=variables)
            for variables in (
                {"PYTHONWARNINGS": "always::webbrowser.X"},
                {"BROWSER": "/bin/sh -c id"},
                {"LD_PRELOAD": "/tmp/x.so"},
                {"NCCL_DEBUG_FILE": "/etc/passwd"},
                {"NCCL_IB_DISABLE": "1", "PATH": "/tmp"},
                {"NCCL_IB_DISABLE": "1; id"},
                {"GLOO_SOCKET_IFNAME": "eth7"},
                {"NCCL_SOCKET_IFNAME": "=eth0,lo"},
            )
        ),
        start(local_size=3),
        start(local_size=-1),
        start(size=10**9),
        start(first_rank=5),
        start(first_rank=-1),
        start(wait_s=1e9),
        start(master="10.0.0.9"),
        start(port=22),
        start(device="cuda; id"),
        Request("start"),
        Request("dial", address="10.0.0.2", port=22),
        Request("dial", address="169.254.169.254", port=40002),
        Request("send", address="10.0.0.1", port=40002, seconds=1.0),
        Request("send", address="10.0.0.1", port=40001, seconds=1e6),
        Request("send", address="10.0.0.1", port=40001, seconds=-1.0),
        Request("meet", PORTS),
    ],
    ids=str,
)
def test_what_a_doctor_never_asks_for_is_not_done(request_: Request) -> None:
    assert why_refused(request_, INFO, PORTS, ["lo", "eth0"])


def test_machines_of_the_doctor_are_told_once_and_no_more_than_there_are() -> None:
    ports = tuple((f"10.0.0.{number}", 40000) for number in range(4))
    assert why_refused(Request("meet", ports), INFO, (), [])
    assert why_refused(Request("meet", (("10.0.0.1", 22),)), INFO, (), [])
    assert not why_refused(Request("meet", PORTS), INFO, (), [])


def test_what_a_doctor_does_ask_for_is_done() -> None:
    interfaces = ["eth0", "ib0", "lo"]
    tried = [variables for backend in ("gloo", "nccl") for variables in collective.candidates(interfaces, backend, 2)]
    asked = [start(variables=variables) for variables in [{}, *tried]]
    asked += [Request("dial", address="10.0.0.2", port=40002), Request("listen"), Request("now"), Request("ended")]
    asked += [Request("send", address="10.0.0.1", port=40001, seconds=1.25)]
    assert len(tried) == 8 and [why_refused(request, INFO, PORTS, interfaces) for request in asked] == [None] * len(
        asked
    )


def test_a_first_machine_that_asks_for_more_is_left() -> None:
    ends = socket.socketpair()
    first, second = meet(ends)
    machine = LocalMachine("h1", "127.0.0.1", INFO, TOKEN)
    first.send(start(variables={"PYTHONWARNINGS": "always::x"}))
    with pytest.raises(UserError) as raised:
        serve(second, machine, INFO)
    assert raised.value.message.fields["why"].id == "asked_to_start_ranks_that_meet_elsewhere"
    assert not machine._ranks
    machine.close()


def test_strangers_keep_no_machine_waiting() -> None:
    """More silent connections than are kept, then a machine; then one with another token, which is counted."""
    listening = network.bound("127.0.0.1", 0)
    info = replace(INFO, master="127.0.0.1", port=listening.getsockname()[1])
    arriving = Arrivals(listening, TOKEN)
    silent = [socket.create_connection(("127.0.0.1", info.port)) for _ in range(MOST_GREETING + 20)]
    connection, machine, _ = connect(info, [Probed("clock")], budget(), TOKEN)
    assert connection
    wait_until(lambda: greeting_threads() <= MOST_GREETING, "threads of those that were turned away go on")
    ((found, greeting),) = arriving.wait(1, budget())
    assert (greeting.nproc, greeting.probed, found.addresses) == (2, (Probed("clock"),), ("127.0.0.1", "127.0.0.1"))
    with pytest.raises(UserError, match="SAMESTEP_TOKEN"):
        connect(info, [], budget(), OTHER_TOKEN)
    wait_until(lambda: arriving.strangers == ["127.0.0.1"], "the stranger is not counted")
    assert not arriving.wait(1, 0.0)
    for end in (connection, found, machine, arriving, *silent):
        end.close()


def greeting_threads() -> int:
    return sum("_greet" in thread.name for thread in threading.enumerate())


def test_names_and_numbers_of_another_machine_are_checked() -> None:
    ends = socket.socketpair()
    first, second = meet(ends)
    greeting = Greeting("h1\x1b[31m\n; rm -rf /", None, 2, ())
    machine = LocalMachine("h0", "127.0.0.1", INFO, TOKEN)
    (remote,) = remote_machines(machine, [(first, greeting)])
    machine.close()
    assert remote.name == first.addresses[1]
    for answer, ask in (
        (Answer(port=22), RemoteMachine.listen),
        (Answer(port=-1), RemoteMachine.listen),
        (Answer(ranks=()), RemoteMachine.ended),
    ):
        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(lambda answer=answer: (second.receive(Request), second.send(answer)))
            with pytest.raises(Lost) as raised:
                ask(remote)
            assert raised.value.message.fields["machine"] == remote.name
            answered.result()


@pytest.mark.parametrize("facts", [{"seconds": "NaN"}, [[[]]], {"interfaces": []}, 7])
def test_facts_that_are_none_are_a_finding(facts: object) -> None:
    report = report_of([("h0", []), ("h1", [Probed(name, facts) for name in PROBES])], {}, 0.0)
    assert {(found.status, found.machine) for found in report.findings} == {("UNKNOWN", "h1")}


def test_facts_that_no_judge_expects_are_a_finding() -> None:
    facts = {"host": "h1", "master": "h0", "port": 1, "nnodes": 2, "addresses": ["no address"], "connect_error": None}
    (found,) = report_of([("h1", [Probed("master", facts)])], {}, 0.0).findings
    assert (found.status, found.why.id) == ("UNKNOWN", "probe_was_not_judged")


def test_bytes_go_to_a_machine_of_this_doctor_alone() -> None:
    """A port of another program gets a line; a stranger's stream is not counted."""
    sink = throughput.Sink("127.0.0.1", TOKEN)
    assert throughput.send("127.0.0.1", sink.port, 0.3, TOKEN).received > 0
    assert throughput.send("127.0.0.1", sink.port, 0.3, OTHER_TOKEN).failure
    sink.close()
    got = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def other_program() -> None:
            stream, _ = server.accept()
            got.extend(stream.recv(1 << 20))
            stream.sendall(b"hello\n")
            while block := stream.recv(1 << 20):
                got.extend(block)

        thread = threading.Thread(target=other_program)
        thread.start()
        assert throughput.send("127.0.0.1", server.getsockname()[1], 0.3, TOKEN).failure
        thread.join(budget())
    assert len(got) <= throughput.LONGEST_LINE and TOKEN.encode() not in got


@pytest.mark.parametrize("token", ["", "short", "0123456789abcdef"])
def test_a_token_that_can_be_guessed_is_refused(token: str) -> None:
    refuses = pytest.raises(UserError, match="openssl") if token == "short" else None
    if refuses:
        with refuses:
            tokens.given({tokens.TOKEN: token})
    else:
        assert tokens.given({tokens.TOKEN: token}) == token


NODES: Mapping[str, Callable[[int], Mapping[str, str]]] = {
    "torchrun": lambda n: {"TORCHELASTIC_RUN_ID": "a", "RANK": f"{2 * n}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    "srun": lambda n: {
        "SLURM_PROCID": f"{2 * n}",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_NODEID": str(n),
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
    },
    "mpirun": lambda n: {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in (("RANK", f"{2 * n}"), ("SIZE", "4"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2"))
    },
    "horovodrun": lambda n: {
        f"HOROVOD_{name}": value
        for name, value in (("RANK", f"{2 * n}"), ("SIZE", "4"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2"))
    },
}


@pytest.mark.parametrize("launcher", sorted(launch.environments()))
def test_inside_each_launcher_on_two_machines_one_rank_of_each_has_a_role(launcher: str) -> None:
    rendezvous = {"MASTER_ADDR": "h0", "MASTER_PORT": "29400", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for node in (0, 1):
        env = rendezvous | dict(NODES[launcher](node))
        role = _role_of_rank(LaunchInfo(), launched_rank(env, launcher), env, 1.0)
        assert (role.info.master, role.info.port) == ("h0", 29400 + APART)
        assert (role.info.nproc, role.info.nnodes, role.first, role.idle) == (2, 2, node == 0, False)
        secret = _role_of_rank(LaunchInfo(), launched_rank(env, launcher), {**env, tokens.TOKEN: "x" * 16}, 1.0)
        assert role.token != secret.token == "x" * 16


def test_an_init_method_tells_its_rendezvous() -> None:
    env = {"MASTER_ADDR": "h0", "MASTER_PORT": "1234"}
    assert rendezvous_of("env://", env) == rendezvous_of("", env) == ("h0", 1234)
    assert rendezvous_of("tcp://[fd77::10]:29500", {}) == ("fd77::10", 29500)
