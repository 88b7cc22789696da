"""Facts of the checks of the group 'launch', and what is said of them."""

from __future__ import annotations

from typing import Any

from samestep.world.checks import launch_variables, machines, master, port
from samestep.world.machine import Dialled, Outcome


def connect_error(outcome: Outcome) -> master.Facts:
    return master.Facts("h1", "h0", 29500, 2, ("10.0.0.1",), Dialled(outcome, 2.0))


# (check, facts of one machine or of several, status, words of the sentence, words of the line that fixes it)
SEEN: list[tuple[str, Any, str, str, str]] = [
    ("launch_variables", launch_variables.Facts(""), "OK", "no launcher's", ""),
    ("launch_variables", launch_variables.Facts("RANK=3 is not below", {"RANK": "3"}), "FAIL", "RANK=3", "unset RANK"),
    ("launch_variables", launch_variables.Facts("", {"WORLD_SIZE": "1"}), "WARN", "WORLD_SIZE=1", "unset WORLD_SIZE"),
    ("launch_variables", launch_variables.Facts("", {"MASTER_PORT": "x"}), "FAIL", "MASTER_PORT=x", "29500"),
    ("port", port.Facts(0), "OK", "no port", ""),
    ("port", port.Facts(29500, "Address already in use", "process 7 (python)"), "FAIL", "process 7", "--port 0"),
    ("port", port.Facts(29500, "Address already in use", "", "mpirun", 29501), "FAIL", "29500", "MASTER_PORT=29501"),
    ("port", port.Facts(80, "Permission denied"), "FAIL", "Permission denied", "--port 0"),
    ("machines", {f"h{n}": machines.Facts(n, 2, 2, "h0", "") for n in range(2)}, "OK", "2 of 2 machines", ""),
    ("machines", {f"h{n}": machines.Facts(1, 2, 2, "h0", "") for n in range(2)}, "FAIL", "h0 and h1 both", "rank 0"),
    ("machines", {"h0": machines.Facts(0, 3, 2, "h0", "")}, "FAIL", "1 of 3 machines", "same command"),
    (
        "machines",
        {"h0": machines.Facts(0, 2, 2, "h0", ""), "h1": machines.Facts(1, 3, 2, "h0", "")},
        "FAIL",
        "h0: 2; h1: 3",
        "same command",
    ),
    (
        "machines",
        {"h0": machines.Facts(0, 2, 2, "h0", ""), "h1": machines.Facts(1, 2, 4, "h0", "")},
        "WARN",
        "h0: 2; h1: 4",
        "--nproc 2",
    ),
    ("master", master.Facts("h1", "h0", 29500, 2, ("10.0.0.1",), None), "OK", "10.0.0.1", ""),
    ("master", master.Facts("h1", "h0", 29500, 2, (), None), "FAIL", "unknown on h1", "/etc/hosts"),
    ("master", master.Facts("h1", "h0", 29500, 2, ("127.0.1.1",), None), "FAIL", "127.0.1.1", "--master-addr"),
    ("master", connect_error("refused"), "FAIL", "refused", "ss -ltn | grep :29500"),
    ("master", connect_error("dropped"), "FAIL", "a firewall drops", "--dport 29500"),
    ("master", connect_error("no route"), "FAIL", "no route", "ip route get h0"),
    ("master", connect_error("open"), "FAIL", "another program", "--port"),
]
