"""Joins a rendezvous a second time as machine 0: `python -m samestep.rank.second_master HOST PORT MACHINES`.

A command of its own, because the one that is refused does not import torch. Exit code 0 when the machine that waits
there will say so.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from samestep.errors import UserError
from samestep.rank.rendezvous import JoinedMachines

CONNECT_S = 10.0


def main(host: str, port: int, machines: str) -> int:
    store = TCPStore(host, port, None, False, timedelta(seconds=CONNECT_S), wait_for_workers=False)
    with suppress(UserError):  # the other has joined, and reads now that this one has, too
        JoinedMachines(store, f"{host}:{port}", machines).join(0)  # without an error the other is refused when it joins
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
