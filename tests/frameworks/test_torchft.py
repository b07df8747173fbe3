"""The groups of torchft (0.2.0) bypass, and work while the others are offloaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from helpers import worlds

import reloadpg

pytestmark = worlds.unbound_only  # torch asks the group for the device that the world is bound to


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


def total(of: Any = None) -> float:
    value = torch.ones(1)
    dist.all_reduce(value, group=of)
    return value.item()


def bypassed() -> list[str]:
    return [group.desc for group in reloadpg.status().bypassed_groups]


def check_managed(group: Any) -> None:
    """A group whose collectives go to a stand-in for torchft's manager works, too."""
    from torchft.process_group import ManagedProcessGroup

    def allreduce(tensor: torch.Tensor, reduce_op: Any) -> Any:
        return group.allreduce([tensor], reduce_op)

    manager = SimpleNamespace(_pg=group, allreduce=allreduce, num_participants=lambda: 7)
    outer: Any = ManagedProcessGroup(manager)
    outer.register("managed")
    with reloadpg.offloaded():
        assert total(outer) == 2
    assert outer.size() == 7
    assert bypassed() == ["torchft-gloo:replicas", "torchft-gloo:managed"]
    outer.unregister()


@pytest.mark.parametrize(
    "real",
    [
        pytest.param(False, id="sequence"),
        pytest.param(True, id="torchft", marks=[pytest.mark.frameworks, pytest.mark.timeout(600)]),
    ],
)
@pytest.mark.ranks(2, timeout=400)
def test_a_group_of_torchft_works_while_the_others_are_offloaded(real: bool, rank: int) -> None:
    """Also after a new quorum has configured it again. ``status`` gives the reason.

    ``register()`` returns the group itself, which functional collectives find. It is torchft's own
    class, or one with the calling sequence of its source.
    """
    reloadpg.install(backends={"gloo"}, timeout=worlds.TIMEOUT)
    worlds.init("gloo")
    # As a tensor: collectives of objects need the device of a bound default group.
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.fill_(server.port)
    dist.broadcast(port, 0)
    group: Any = Sequence()
    if real:
        from torchft.process_group import ProcessGroupGloo

        group = ProcessGroupGloo()
    group.configure(f"127.0.0.1:{int(port)}/first", f"replica {rank}", rank, 2)
    assert group.register("replicas") is group
    assert total() == total(group) == 2
    with reloadpg.offloaded():
        for quorum in ("first", "second"):
            with pytest.raises(reloadpg.GroupOffloadedError):
                total()
            assert total(group) == 2
            if quorum == "first":
                group.configure(f"127.0.0.1:{int(port)}/second", f"replica {rank}", rank, 2)
    assert total() == total(group) == 2
    assert functional.all_reduce(torch.ones(1), "sum", group).item() == 2
    (only,) = reloadpg.status().bypassed_groups
    assert (only.desc, only.reason) == ("torchft-gloo:replicas", "1 rank, fewer than min_size=2")
    assert reloadpg.status().unmanaged == {}
    if real:
        check_managed(group)
    group.unregister()
    assert bypassed() == []
    with reloadpg.offloaded():
        pass
    assert total() == 2
