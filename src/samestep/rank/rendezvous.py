"""torchrun's static rendezvous with a store that listens on the master's address only.

torch's TCPStore listens on every interface. This handler gives it a socket that is bound to one. torchrun finds the
handler by its entry point in the group `torchrun.handlers`. Port 0 in the endpoint means any free port.
Source: https://docs.pytorch.org/docs/stable/elastic/rendezvous.html
"""

from __future__ import annotations

from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from samestep.world.network import bound

JOIN_S = 600  # how long a machine waits for the master, as torch's own handler does


class BoundRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, except that the store listens on one address."""

    def get_backend(self) -> str:
        return "samestep"

    def next_rendezvous(self) -> RendezvousInfo:
        if not self._store:
            if self.rank == 0:
                listening = bound(self.master_addr, self.master_port)
                self.master_port = listening.getsockname()[1]
                self._store = TCPStore(
                    self.master_addr,
                    self.master_port,
                    None,
                    True,
                    self.timeout,
                    wait_for_workers=False,
                    multi_tenant=True,
                    master_listen_fd=listening.detach(),
                )
            else:
                self._store = TCPStore(
                    self.master_addr, self.master_port, None, False, self.timeout, wait_for_workers=False
                )
        store = PrefixStore(self.run_id, self._store)
        store_info = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(store, self.rank, self.world_size, store_info)


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns the function that torchrun calls with its parameters to create the handler: its entry point."""

    def create(params: RendezvousParameters) -> RendezvousHandler:
        host, port = parse_rendezvous_endpoint(params.endpoint, 0)
        rank, timeout_s = int(params.config["rank"]), int(params.config.get("timeout", JOIN_S))
        return BoundRendezvous(host, port, rank, params.max_nodes, params.run_id, timeout_s)

    return create
