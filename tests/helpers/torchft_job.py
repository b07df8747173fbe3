"""Groups of torchft (0.2.0) together with reloadable groups: its own class, or a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import worlds

import reloadpg


class Sequence(dist.ProcessGroup):
    """A stand-in with the calling sequence of ``ProcessGroupGloo`` of torchft 0.2.0.

    ``configure`` gives the group its communicator. ``register`` makes it the backend of a group of
    one rank.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._inner: Any = None
        self._made = ""

    def configure(self, address: str, replica_id: str, rank: int, world_size: int) -> None:
        self.abort()
        host, _, rest = address.partition(":")
        port, _, prefix = rest.partition("/")
        server = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        store = dist.PrefixStore(prefix, server)
        inner = dist.ProcessGroup(store, rank, world_size)
        gloo = dist.ProcessGroupGloo(store, rank, world_size, worlds.TIMEOUT)
        inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._inner = inner

    def register(self, name: str) -> Any:
        backend = f"{self.getBackendName()}:{name}"
        dist.Backend.register_backend(backend, lambda *_: self, devices=["cpu"])
        ranks = [dist.get_rank()]
        return dist.new_group(ranks=ranks, backend=backend, group_desc=backend)

    def unregister(self) -> None:
        dist.destroy_process_group(self)

    def abort(self) -> None:
        self._inner = None

    def shutdown(self) -> None:
        self._inner = None

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self._inner.allreduce(tensors, options)

    def size(self) -> int:
        return int(self._inner.size())

    def getBackendName(self) -> str:
        return "torchft-gloo"

    group_name = property(lambda self: self._made)

    def _set_group_name(self, name: str) -> None:
        self._made = name


def alongside(rank: int, size: int, real: bool) -> dict[str, Any]:
    """Use a group of torchft around an offload of the others, and configure it twice."""
    reloadpg.install(backends={"gloo"}, timeout=worlds.TIMEOUT)
    worlds.init("gloo")
    ports: list[Any] = [None]
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ports = [server.port]
    # As a tensor: collectives of objects need the device of a bound default group.
    port = torch.tensor(ports if rank == 0 else [0])
    dist.broadcast(port, 0)
    address = f"127.0.0.1:{int(port)}"
    group = torchfts_own() if real else Sequence()
    group.configure(f"{address}/first", f"replica {rank}", rank, size)
    registered = group.register("replicas")
    seen: dict[str, Any] = {"same": registered is group}

    def total(of: Any = None) -> float | str:
        value = torch.ones(1)
        try:
            dist.all_reduce(value, group=of)
        except reloadpg.GroupOffloadedError as error:
            return type(error).__name__
        return value.item()

    def noted(name: str) -> None:
        seen[name] = (total(), total(group))

    noted("live")
    with reloadpg.offloaded():
        noted("offloaded")
        group.configure(f"{address}/second", f"replica {rank}", rank, size)
        noted("configured")
    noted("reloaded")
    seen["functional"] = functional.all_reduce(torch.ones(1), "sum", group).item()
    seen["bypassed"] = [(one.desc, one.reason) for one in reloadpg.status().bypassed_groups]
    seen["unmanaged"] = dict(reloadpg.status().unmanaged)
    if real:
        seen["managed"] = managed(group, total)
    group.unregister()
    seen["afterwards"] = [one.desc for one in reloadpg.status().bypassed_groups]
    with reloadpg.offloaded():
        pass
    seen["last"] = total()
    return seen


def torchfts_own() -> Any:
    from torchft.process_group import ProcessGroupGloo

    return ProcessGroupGloo()


def managed(group: Any, total: Any) -> Any:
    """Use a group whose collectives go to a stand-in for torchft's manager."""
    from torchft.process_group import ManagedProcessGroup

    def allreduce(tensor: torch.Tensor, reduce_op: Any) -> Any:
        return group.allreduce([tensor], reduce_op)

    manager = SimpleNamespace(_pg=group, allreduce=allreduce, num_participants=lambda: 7)
    outer: Any = ManagedProcessGroup(manager)
    outer.register("managed")
    with reloadpg.offloaded():
        inside = total(outer)
    descs = [one.desc for one in reloadpg.status().bypassed_groups]
    outer.unregister()
    return inside, outer.size(), descs
