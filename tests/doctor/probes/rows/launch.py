"""Facts of the probes of 'launch', and what is found in them."""

from __future__ import annotations

from doctor.probes.row import Row
from samestep.doctor.probes.launch import LaunchOptions, LaunchVariables, Master, RendezvousPort
from samestep.world.network import Dialled, Outcome


def connect_error(outcome: Outcome) -> Master:
    return Master("h1", "h0", 29500, 2, ("10.0.0.1",), Dialled(outcome, 2.0))


ROWS: list[Row] = [
    ("launch_variables", LaunchVariables(""), "OK", "no_launcher_variables", {}, ""),
    (
        "launch_variables",
        LaunchVariables("RANK=3 is not below", {"RANK": "3"}),
        "FAIL",
        "launcher_variables_contradict",
        {},
        "unset RANK",
    ),
    (
        "launch_variables",
        LaunchVariables("", {"WORLD_SIZE": "1"}),
        "WARN",
        "launcher_variables_are_stale",
        {"variables": ["WORLD_SIZE=1"]},
        "unset WORLD_SIZE",
    ),
    ("launch_variables", LaunchVariables("", {"MASTER_PORT": "x"}), "FAIL", "master_port_is_no_port", {}, "29500"),
    ("port", RendezvousPort(0), "OK", "no_port_of_this_machine", {}, ""),
    (
        "port",
        RendezvousPort(29500, "Address already in use", 7, "python"),
        "FAIL",
        "port_is_taken_by_process",
        {"pid": 7},
        "--port 0",
    ),
    (
        "port",
        RendezvousPort(29500, "Address already in use", started_by="mpirun", free=29501),
        "FAIL",
        "port_is_taken_by_another_user",
        {"port": 29500},
        "MASTER_PORT=29501",
    ),
    (
        "port",
        RendezvousPort(80, "Permission denied"),
        "FAIL",
        "port_cannot_be_opened",
        {"error": "Permission denied"},
        "--port 0",
    ),
    (
        "machines",
        {f"h{n}": LaunchOptions(n, 2, 2, "h0", "") for n in range(2)},
        "OK",
        "machines_have_connected",
        {"connected": 2, "expected": 2, "nproc": 2},
        "",
    ),
    (
        "machines",
        {f"h{n}": LaunchOptions(1, 2, 2, "h0", "") for n in range(2)},
        "FAIL",
        "node_rank_given_twice",
        {"machines": ["h0", "h1"], "node_rank": 1},
        "rank 0",
    ),
    (
        "machines",
        {"h0": LaunchOptions(0, 3, 2, "h0", "")},
        "FAIL",
        "machines_have_not_connected",
        {"connected": 1, "expected": 3},
        "same command",
    ),
    (
        "machines",
        {"h0": LaunchOptions(0, 2, 2, "h0", ""), "h1": LaunchOptions(1, 3, 2, "h0", "")},
        "FAIL",
        "nnodes_differs_between_machines",
        {"values": ["h0: 2", "h1: 3"]},
        "same command",
    ),
    (
        "machines",
        {"h0": LaunchOptions(0, 2, 2, "h0", ""), "h1": LaunchOptions(1, 2, 4, "h0", "")},
        "WARN",
        "nproc_differs_between_machines",
        {"values": ["h0: 2", "h1: 4"]},
        "--nproc 2",
    ),
    (
        "master",
        Master("h1", "h0", 29500, 2, ("10.0.0.1",), None),
        "OK",
        "master_has_addresses",
        {"addresses": ["10.0.0.1"]},
        "",
    ),
    ("master", Master("h1", "h0", 29500, 2, (), None), "FAIL", "master_name_is_unknown", {"host": "h1"}, "/etc/hosts"),
    (
        "master",
        Master("h1", "h0", 29500, 2, ("127.0.1.1",), None),
        "FAIL",
        "master_is_loopback",
        {"address": "127.0.1.1"},
        "--master-addr",
    ),
    ("master", connect_error("refused"), "FAIL", "master_refuses_connections", {}, "ss -ltn | grep :29500"),
    ("master", connect_error("dropped"), "FAIL", "master_does_not_answer", {}, "--dport 29500"),
    ("master", connect_error("no route"), "FAIL", "no_route_to_master", {}, "ip route get h0"),
    ("master", connect_error("open"), "FAIL", "no_doctor_answers_at_master", {}, "--port"),
]
