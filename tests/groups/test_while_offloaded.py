"""While groups are offloaded, every method that needs a communicator raises.

``test_op_table.py`` has the collectives, ``test_identity.py`` the queries.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.jobs import TIMEOUT, start
from helpers.tables import summed
from torch.distributed import distributed_c10d as c10d

import reloadpg
from reloadpg import GroupOffloadedError
from reloadpg.errors import NotInstalledError
from reloadpg.groups import dispatch


@pytest.mark.guarantees
@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_every_method_that_needs_a_communicator_raises():
    """The error names the operation and the group."""
    start()
    pair = dist.new_group([0, 1])
    reloadpg.offload()
    names = sorted(dispatch.DISPATCHED)
    assert len(names) > 25
    for group in (dist.group.WORLD, pair):
        for name in names:
            if name == "_get_backend":
                assert "OffloadedBackend" in repr(group._get_backend())
                continue
            arguments = (None, 0, 0) if name in ("send", "recv") else ()
            with pytest.raises(GroupOffloadedError) as caught:
                getattr(group, name)(*arguments)
            assert caught.value.operation == name
            assert caught.value.group == group.group_name


class _NotOurs:
    """In the place of a class of torchcomms, which is not installed."""


@pytest.mark.guarantees
@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_a_query_returns_a_backend_whose_every_use_raises(rank):
    """Torch queries all groups when it extends timeouts, sets one, or destroys another group.

    A timeout that is set while the group is offloaded holds after the reload.
    """
    start()
    gone, kept = dist.new_group([0, 1]), dist.new_group([0, 1])
    reloadpg.offload()
    c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=7))
    backend = kept._get_backend(worlds.device())
    for name, use in (
        ("allreduce", lambda: backend.allreduce([torch.ones(1)])),
        ("barrier", lambda: backend.barrier()),
        ("options", lambda: backend.options),
        ("abort", lambda: backend.abort()),
    ):
        with pytest.raises(GroupOffloadedError) as caught:
            use()
        assert caught.value.operation == name
    c10d._set_pg_timeout(timedelta(seconds=41), kept)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=42), kept)
    # With torchcomms installed, torch asks a group for its backends before it destroys it.
    c10d._TORCHCOMM_AVAILABLE, c10d._BackendWrapper = True, _NotOurs
    dist.destroy_process_group(gone)
    reloadpg.reload()
    after = kept._get_backend(worlds.device())
    assert after.options._timeout.total_seconds() == 42
    assert summed(kept, rank) == 3


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_refused_coalescing_does_not_postpone_later_collectives(rank):
    """Torch keeps the group in its table of open coalescings; later calls must not go there."""
    start()
    reloadpg.offload()
    for _ in range(2):
        manager = c10d._coalescing_manager(device=torch.device("cpu"))
        with pytest.raises(GroupOffloadedError) as caught, manager:
            dist.all_reduce(torch.ones(1))
        assert caught.value.operation == "_start_coalescing"
        with pytest.raises(GroupOffloadedError) as caught:
            dist.all_reduce(torch.ones(1))
        assert caught.value.operation == "allreduce"
    reloadpg.reload()
    assert summed(None, rank) == 3


# ---------------------------------------------------------------------------------------------
# calls with nothing to do (failure 23)


@pytest.mark.ranks(2)
def test_calls_before_install_raise_one_error_and_change_nothing(rank):
    worlds.init(timeout=TIMEOUT)
    for call in (
        reloadpg.offload,
        reloadpg.reload,
        lambda: reloadpg.offloaded().__enter__(),
    ):
        with pytest.raises(NotInstalledError, match=r"nothing was changed.*reloadpg\.install\(\)"):
            call()
    status = reloadpg.status()
    assert (status.installed, status.state, status.groups) == (False, "live", ())
    assert summed(None, rank) == 3


def _did(*reports):
    """Whether each operation changed something; one that did not has a note."""
    assert all(report.changed != bool(report.note) for report in reports)
    return [report.changed for report in reports]


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_repeated_and_early_calls_do_nothing(rank):
    """Before init, before an offload, a second time, after destroy: the report has a note."""
    reloadpg.install(backends={worlds.BACKEND}, timeout=TIMEOUT)
    assert _did(reloadpg.offload(), reloadpg.reload()) == [False, False]
    worlds.init(timeout=TIMEOUT)
    pair = dist.new_group([0, 1])
    inner = pair._managed.communicator
    assert _did(reloadpg.reload(), reloadpg.reload()) == [False, False]
    assert pair._managed.communicator is inner
    del inner
    assert _did(*(reloadpg.offload() for _ in range(3))) == [True, False, False]
    assert (reloadpg.status().state, pair.state) == ("offloaded", "offloaded")
    assert _did(reloadpg.reload(), reloadpg.reload()) == [True, False]
    assert (pair.generation, summed(pair, rank), summed(None, rank)) == (1, 3, 3)
    dist.destroy_process_group()
    assert _did(reloadpg.offload(), reloadpg.reload()) == [False, False]


@pytest.mark.ranks(2)
def test_callbacks_run_on_every_offload_that_releases_something(rank):
    """Also for a group created while the others are offloaded, whose buffers go first (18)."""
    start()
    called = []

    def callback():
        called.append(len(reloadpg.status().groups))

    _, remove = reloadpg.on_offload(callback), reloadpg.on_offload(callback)
    remove()  # of two equal registrations, one
    reloadpg.offload()
    late = dist.new_group([0, 1])
    assert _did(reloadpg.offload(), reloadpg.offload()) == [True, False]
    assert (called, late.state) == ([1, 2], "offloaded")
    reloadpg.reload()
    assert summed(late, rank) == 3


@pytest.mark.ranks(1)
@pytest.mark.parametrize("min_size", [2, 1])
def test_a_job_of_one_rank(rank, min_size):
    """Its groups bypass by default, and are reloadable with ``min_size=1`` (failures 21, 23)."""
    start(min_size=min_size)
    own, reloadable = dist.new_group([0]), min_size == 1
    assert isinstance(own, reloadpg.ReloadableProcessGroup) == reloadable
    for cycle in range(1, 3):
        assert reloadpg.offload().changed == reloadable
        if reloadable:
            with pytest.raises(GroupOffloadedError):
                summed(own, rank)
        else:
            assert summed(own, rank) == 1
        assert reloadpg.reload().changed == reloadable
        assert summed(own, rank) == summed(None, rank) == 1
        assert getattr(own, "generation", cycle) == cycle
