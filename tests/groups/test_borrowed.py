"""What leaves a group: who has taken what, and the callbacks that drop it."""

from __future__ import annotations

import gc
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from torch.torch_version import TorchVersion

import reloadpg
from reloadpg.errors import InvalidOptionError

pytestmark = pytest.mark.matrix


def start(**options: Any) -> Any:
    reloadpg.install(backends={worlds.BACKEND}, timeout=timedelta(seconds=60), **options)
    worlds.init()
    return dist.group.WORLD


def total(backend: Any) -> float:
    tensor = torch.ones(1)
    backend.allreduce([tensor]).wait()
    return tensor.item()


@pytest.mark.ranks(2)
def test_a_backend_that_outlives_its_generation_is_named() -> None:
    """It is torch's own object. While the group is offloaded, the group gives out none."""
    world = start()
    backend = world._get_backend(worlds.device())
    assert type(backend).__module__.startswith("torch.")
    assert total(backend) == 2.0
    report = reloadpg.offload()
    (warning,) = [text for text in report.warnings if "backend taken by" in text]
    assert "no longer belongs to the group" in warning
    assert f"taken by {__name__} (test_borrowed.py:" in warning
    with pytest.raises(reloadpg.GroupOffloadedError, match=r"Call reloadpg.reload"):
        total(world._get_backend(worlds.device()))
    reloadpg.reload()
    again = world._get_backend(worlds.device())
    assert again is not backend
    assert total(again) == 2.0


@pytest.mark.ranks(2)
def test_the_taker_is_known_while_it_holds_the_object() -> None:
    """By module, line and generation. Torch's own calls, and a reference that is gone, are none.

    Torch 2.15 keeps the object as long as the backend lives, so only its end shows that it is gone.
    """
    world = start()
    worlds.barrier()
    assert world._get_backend(worlds.device()).rank() == world.rank()
    gc.collect()
    in_torch = eval("lambda g, d: g._get_backend(d)", vars(dist.distributed_c10d))
    torchs = in_torch(world, worlds.device())
    assert type(torchs).__module__.startswith("torch.")
    del torchs
    kept = reloadpg.status().borrowed
    assert len(kept) == (TorchVersion(torch.__version__) >= "2.15")
    backend = world._get_backend(worlds.device())
    line = sys._getframe().f_lineno - 1
    (one,) = {*reloadpg.status().borrowed} - {*kept}
    assert (one.group, one.what, one.generation) == (world.group_name, "backend", 0)
    assert (one.by, one.where) == (__name__, f"test_borrowed.py:{line}")
    assert (one.ended, one.raw) == (False, False)
    assert str(one) in str(reloadpg.status())
    reloadpg.offload()
    assert [one.ended for one in reloadpg.status().borrowed] == [True] * (1 + len(kept))
    reloadpg.reload()
    del backend
    gc.collect()
    assert reloadpg.status().borrowed == ()


@pytest.mark.ranks(2)
def test_nothing_is_recorded_on_request() -> None:
    world = start(borrowed="ignore")
    backend = world._get_backend(worlds.device())
    assert backend.rank() == world.rank()
    assert reloadpg.status().borrowed == ()


@pytest.mark.ranks(2)
def test_the_policy_is_equal_on_all_ranks(rank: int) -> None:
    start(borrowed="warn" if rank else "refuse")
    with pytest.raises(reloadpg.DisagreementError, match="borrowed"):
        reloadpg.offload()


# -- callbacks of a group --------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_callbacks_of_a_group_run_in_one_order_on_live_groups(rank: int) -> None:
    """Each can run a collective on its group, with the group and the backend of the generation."""
    world = start()
    groups = {"world": world, "a": dist.new_group([0, 1, 2]), "b": dist.new_group([1, 2])}
    seen: list[str] = []

    def on(name: str, moment: str) -> Any:
        def call(group: Any, backend: Any) -> None:
            tensor = torch.tensor([float(rank)])
            backend.allreduce([tensor]).wait()
            seen.append(f"{moment} {name} {group.generation} {tensor.item():g}")

        return call

    ends = [
        register(on(name, moment), group=group)
        for name, group in groups.items()
        for register, moment in ((reloadpg.on_offload, "before"), (reloadpg.on_reload, "after"))
        if isinstance(group, dist.ProcessGroup)
    ]
    reloadpg.on_offload(lambda: seen.append("on_offload"))
    reloadpg.on_reload(lambda: seen.append("on_reload"))
    reloadpg.offload()
    assert dist.is_initialized()
    reloadpg.reload()
    mine = ("world", "a", "b") if rank else ("world", "a")
    sums = {"world": 3, "a": 3, "b": 3}
    assert seen == [
        "on_offload",
        *[f"before {name} 0 {sums[name]}" for name in reversed(mine)],
        *[f"after {name} 1 {sums[name]}" for name in mine],
        "on_reload",
    ]
    for end in ends:
        end()
    seen.clear()
    reloadpg.offload()
    reloadpg.reload()
    assert seen == ["on_offload", "on_reload"]


@pytest.mark.ranks(2)
def test_a_callback_that_raises_is_named_and_nothing_is_changed(rank: int) -> None:
    """Also on ranks without callbacks. In the reload, the groups are live on all ranks."""
    world = start()
    fails = ["before", "after"]

    def call(moment: str) -> Any:
        def run(group: Any, backend: Any) -> None:
            if moment in fails:
                fails.remove(moment)
                raise ValueError("of the library")

        return run

    if rank == 0:
        reloadpg.on_offload(call("before"), group=world)
        reloadpg.on_reload(call("after"), group=world)
    error: Any = reloadpg.ReloadpgError if rank == 0 else reloadpg.PeerFailedError
    with pytest.raises(
        error, match=r"callback .*call\.<locals>\.run for .* raised ValueError: of the library"
    ):
        reloadpg.offload()
    assert world.state == "live"
    reloadpg.offload()
    if rank == 0:
        with pytest.raises(error, match=r"callback .*\.run for"):
            reloadpg.reload()
    else:
        reloadpg.reload()
    assert world.state == "live"
    reloadpg.reload()
    assert total(world) == 2.0


@pytest.mark.ranks(2)
def test_wrong_callbacks_are_refused_and_plain_groups_never_end() -> None:
    start()
    world = dist.group.WORLD
    given: tuple[tuple[Any, Any], ...] = (
        (3, {}),
        (print, {"group": "a name"}),
        (print, {"group": world, "sets": "trainer"}),
        (print, {"group": world, "before": True}),
    )
    for callback, options in given:
        with pytest.raises(InvalidOptionError, match="nothing was registered"):
            reloadpg.on_reload(callback, **options)
    plain = dist.new_group([0, 1], backend="gloo") if worlds.NCCL else dist.ProcessGroup(0, 1)
    called: list[Any] = []
    reloadpg.on_offload(lambda *_: called.append(1), group=plain)
    reloadpg.offload()
    assert called == []
