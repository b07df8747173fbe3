"""Tests of a trainer's own groups: what must survive an offload and a reload, without a GPU.

``pytest --reloadpg-survival MODULE:FUNCTION`` runs this file. FUNCTION is the trainer's: it creates
its groups from torch's default group, which exists, and takes no argument. If it returns a
function, that one is called on each rank before and after the reloads, and must return equal
values. Everything is on real processes over gloo, or over torch's ProcessGroupNCCL with
``--reloadpg-standins``.

Do not import this module in a program: pytest passes the function.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import reloadpg
from reloadpg import c10d
from reloadpg.groups.registry import registry
from reloadpg.lifecycle.connect import sum_ranks
from reloadpg.testing import run_ranks, simulated, standins

Build = Callable[[], object]
TIMEOUT = timedelta(seconds=77)
"""Timeout of the default group: not a default of torch."""
_LIMIT_S = 60.0
_MISSING_S = 2.0


# -- in each rank -------------------------------------------------------------------------------


def _start(build: Build, timeout: float = 20.0, backend: str = "") -> Callable[[], object]:
    """Install, create the default group and the trainer's; return the trainer's step."""
    on_nccl = standins.enabled()
    backends = None if on_nccl or backend else {"gloo"}
    reloadpg.install(backends=backends, timeout=timeout, min_size=1)
    dist.init_process_group(backend or ("nccl" if on_nccl else "gloo"), timeout=TIMEOUT)
    if on_nccl:
        torch.cuda.set_device(dist.get_rank())
    step = build()
    return step if callable(step) else lambda: None


def _groups() -> dict[str, ProcessGroup]:
    return {f"{one.name} {one.desc!r}": one.proxy for one in registry.managed()}


def _device() -> torch.device:
    return torch.device("cuda" if standins.enabled() else "cpu")


def _sum(group: ProcessGroup, name: str) -> None:
    total, expected = sum_ranks(group, _device())
    assert total == expected, f"group {name}: the sum over its ranks is {total}, not {expected}"


def _properties(group: ProcessGroup) -> dict[str, object]:
    devices = tuple(c10d.device_backends(group))
    return {
        "object": id(group),
        "hash": hash(group),
        "name": group.group_name,
        "description": c10d.desc_of(group),
        "ranks": c10d.ranks_of(group),
        "rank": group.rank(),
        "backend": c10d.backend_of(group),
        "timeout": c10d.get_timeouts(group, devices),
        "options": _values(c10d.options_of(group, devices)),
    }


def _values(options: object) -> dict[str, object]:
    """What a user can set of a backend's options, or of NCCL's configuration in them."""
    found: dict[str, object] = {}
    for name in dir(options) if options is not None else ():
        value = getattr(options, name)
        if name == "config":
            found[name] = _values(value)
        elif isinstance(value, bool | int | float | str) and not name.startswith(("_", "split")):
            found[name] = value
    found.pop("group_name", None)  # of its generation
    return found


def _cycle() -> None:
    reloadpg.offload()
    reloadpg.reload()


def _lasting(rank: int, world_size: int, build: Build) -> list[str]:
    step = _start(build)
    world, first = dist.group.WORLD, step()
    before = {name: _properties(group) for name, group in _groups().items()}
    unmanaged = [name for name, _ in reloadpg.status().unmanaged.items()]
    assert not unmanaged, f"groups that keep their communicators: {unmanaged}"
    for count in (1, 2):
        _cycle()
        assert dist.group.WORLD is world, "the default group is another object after a reload"
        after = {name: _properties(group) for name, group in _groups().items()}
        assert after.keys() == before.keys(), f"groups differ: {sorted(after)}, {sorted(before)}"
        for name, values in before.items():
            for what, value in values.items():
                now = after[name][what]
                assert now == value, f"group {name}: its {what} was {value!r}, and is {now!r}"
        for name, group in _groups().items():
            _sum(group, name)
        again = step()
        assert again == first, f"reload {count}: the step returned {again!r}, before {first!r}"
    dist.destroy_process_group()
    return sorted(before)


def _priming(rank: int, world_size: int, build: Build) -> None:
    _start(build)
    _cycle()
    for name, group in _groups().items():  # the first operation of each, as in a pipeline
        ranks, size = c10d.ranks_of(group), group.size()
        if size == 1:
            continue
        place = group.rank()
        sent = torch.tensor([float(rank)]).to(_device())
        got = torch.tensor([-1.0]).to(_device())
        following, previous = ranks[(place + 1) % size], ranks[(place - 1) % size]
        operations = [
            dist.P2POp(dist.isend, sent, following, group),
            dist.P2POp(dist.irecv, got, previous, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert got.item() == previous, f"group {name}: received {got.item()}, not {previous}"
    dist.destroy_process_group()


def _waiting(rank: int, world_size: int, build: Build) -> None:
    _start(build, timeout=_MISSING_S)
    last, store = world_size - 1, c10d.store_of(registry.managed()[0].proxy)
    if rank == last:  # late, by less than the timeout
        time.sleep(_MISSING_S / 2)
    reloadpg.offload()
    for name, group in _groups().items():
        with pytest.raises(reloadpg.GroupOffloadedError):
            _sum(group, name)
        assert c10d.ranks_of(group)[group.rank()] == rank
    if rank == last:  # missing: its reload comes after the others have raised
        store.wait(["survival/raised"], timedelta(seconds=_LIMIT_S))
    else:
        began = time.monotonic()
        with pytest.raises(reloadpg.RendezvousTimeoutError) as raised:
            reloadpg.reload()
        assert raised.value.missing == (last,), f"missing: {raised.value.missing}"
        assert time.monotonic() - began < _LIMIT_S / 2
        store.set("survival/raised", "1")
    reloadpg.reload()
    for name, group in _groups().items():
        _sum(group, name)
    dist.destroy_process_group()


def _memory(rank: int, world_size: int, build: Build) -> None:
    if not standins.enabled():
        simulated.register()
        simulated.configure(bytes_per_communicator=1 << 20)
    _start(build, backend="" if standins.enabled() else "sim")

    def held() -> int:
        return standins.communicators() if standins.enabled() else simulated.stats().held_bytes

    for name, group in _groups().items():
        _sum(group, name)
    before = held()
    assert before, "no group holds memory of the device"
    for _ in range(2):
        reloadpg.offload()
        assert held() == 0, f"of {before}, {held()} are still held while offloaded"
        reloadpg.reload(connect="eager")
        assert held() == before, f"{held()} are held after the reload, {before} before"
    dist.destroy_process_group()


# -- the tests ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def build(request: pytest.FixtureRequest) -> Build:
    function: Build = request.config.stash[FUNCTION]
    return function


@pytest.fixture(scope="module")
def world_size(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--reloadpg-survival-ranks"))


FUNCTION = pytest.StashKey[Build]()


def test_timeouts_options_descriptions_and_the_default_group_survive(
    build: Build, world_size: int
) -> None:
    """Also name, ranks, backend and identity of each group; its collectives and the step work."""
    named = run_ranks(_lasting, world_size, args=(build,), timeout=_LIMIT_S)
    assert max(map(len, named)) > 1, (
        f"{build.__qualname__} created no group that is reloadable: each rank has {named[0]}. Call "
        "torch.distributed.new_group, or a function that does, inside it."
    )


def test_a_pipeline_needs_no_priming(build: Build, world_size: int) -> None:
    """The first operation of each group after a reload may be a send and a receive."""
    run_ranks(_priming, world_size, args=(build,), timeout=_LIMIT_S)


def test_ranks_wait_for_a_late_one_and_name_a_missing_one(build: Build, world_size: int) -> None:
    """A use while offloaded raises; after a missing rank has returned, all groups work."""
    if world_size < 2:
        pytest.skip("one rank waits for no other")
    run_ranks(_waiting, world_size, args=(build,), timeout=_LIMIT_S)


def test_the_memory_comes_back(build: Build, world_size: int) -> None:
    """Each communicator is released by an offload, and there is none too many after a reload."""
    run_ranks(_memory, world_size, args=(build,), timeout=_LIMIT_S)
