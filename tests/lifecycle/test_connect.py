"""reload(connect=...): none, eager, canary."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import start

import reloadpg


def _start():
    start()
    dist.new_group([0, 1])
    dist.new_group([2, 1])


class _Intercepted:
    """Call a function after each all-reduce of a reloadable group within this block."""

    def __init__(self, then):
        self.then = then

    def __enter__(self):
        self.original = original = reloadpg.ReloadableProcessGroup.allreduce

        def allreduce(group, tensors, *args, **kwargs):
            work = original(group, tensors, *args, **kwargs)
            self.then(group, tensors, work)
            return work

        reloadpg.ReloadableProcessGroup.allreduce = allreduce

    def __exit__(self, *_):
        reloadpg.ReloadableProcessGroup.allreduce = self.original


@pytest.mark.ranks(3)
@pytest.mark.parametrize("how", ["canary", "none", "eager"])
def test_collectives_of_a_reload(how):
    """The canary is one small all-reduce per group, in the order of the rebuild (failure 17)."""
    _start()
    log = []
    reloadpg.offload()
    with _Intercepted(lambda group, *_: log.append(group.group_name)):
        report = reloadpg.reload(connect=how)
    order = [group.name for group in report.groups]
    assert log == (order if how == "canary" else [])
    assert len(order) >= 2  # WORLD and a pair at least


@pytest.mark.ranks(3)
def test_a_wrong_canary_fails_the_reload_on_all_ranks(rank):
    """A second reload completes."""
    _start()
    reloadpg.offload()

    def change_the_sum(group, tensors, work):
        work.wait()
        if rank == 1 and group.group_name == "1":
            tensors[0] += 1

    own = rank == 1
    error = reloadpg.errors.RebuildError if own else reloadpg.PeerFailedError
    with (
        _Intercepted(change_the_sum),
        pytest.raises(error, match="canary" if own else "rank 1 failed"),
    ):
        reloadpg.reload(connect="canary")
    assert {group.state for group in reloadpg.status().groups} == {"failed"}
    reloadpg.reload(connect="canary")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert (tensor.item(), reloadpg.status().state) == (3, "live")


@pytest.mark.ranks(2)
def test_a_wrong_canary_of_bring_up_is_an_error_on_all_ranks(rank):
    """A wrong sum suffices, without an error of the collective. No group is left."""
    reloadpg.install(backends={"gloo"})

    def change_the_sum(group, tensors, work):
        work.wait()
        tensors[0] += rank

    said = "the sum over the ranks is .*, expected" if rank == 1 else "rank 1 failed"
    with _Intercepted(change_the_sum), pytest.raises(reloadpg.ReloadpgError, match=said):
        reloadpg.environment.init_distributed("gloo", connect="canary", init_timeout=60)
    assert not dist.is_initialized()


def test_an_unknown_value_of_connect_is_refused():
    """For ranks with different values, see ``test_pending.py``."""
    with pytest.raises(reloadpg.errors.InvalidOptionError, match=r"'perhaps'.*'canary'"):
        reloadpg.reload(connect="perhaps")
