"""Device and backend of a rank, on an accelerator that is made up: a device module without devices.

Torch's own functions for accelerators of other makers (``rename_privateuse1_backend``,
``_register_device_module``, ``Backend.register_backend``) run as they are.
"""

from __future__ import annotations

import os
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reloadpg
from reloadpg.environment.device import Placement
from reloadpg.testing import run_ranks

KIND, BACKEND = "toaster", "bread"


class Accelerator(types.ModuleType):
    """What torch and the library ask an accelerator's module; it notes what was made current."""

    def __init__(self, uuids: list[str]) -> None:
        super().__init__(f"torch.{KIND}")
        self.uuids = uuids
        self.used: list[int] = []
        self.streams: list[object] = []
        self.Stream = object

    def is_available(self) -> bool:
        return bool(self.uuids)

    def is_initialized(self) -> bool:
        return False

    def device_count(self) -> int:
        return len(self.uuids)

    def set_device(self, index: int) -> None:
        self.used.append(index)

    def set_stream(self, stream: object) -> None:
        self.streams.append(stream)

    def get_device_properties(self, index: int) -> Any:
        return types.SimpleNamespace(uuid=self.uuids[index])

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...


def _create(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def plug_in(uuids: list[str]) -> Accelerator:
    accelerator = Accelerator(uuids)
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, accelerator)
    dist.Backend.register_backend(BACKEND, _create, devices=[KIND])
    return accelerator


def place(
    rank: int, world_size: int, uuids: list[list[str]], options: dict[str, Any]
) -> tuple[Any, ...]:
    accelerator = plug_in(uuids[rank])
    try:
        with reloadpg.init_distributed(init_timeout=60, connect="none", **options) as context:
            return str(context.device), accelerator.used, dist.get_backend()
    except (reloadpg.InvalidOptionError, reloadpg.DisagreementError) as error:
        assert not dist.is_initialized()
        return type(error).__name__, str(error)


TWO = [["a", "b"], ["a", "b"]]
ONE_EACH = [["a"], ["b"]]


@pytest.mark.parametrize(
    ("uuids", "env", "indices"),
    [
        (TWO, {}, [0, 1]),
        (TWO, {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}, [0, 1]),  # all are on this host
        (ONE_EACH, {}, [0, 0]),
        (ONE_EACH, {"LOCAL_RANK": "0"}, [0, 0]),
    ],
    ids=["local rank", "env rendezvous", "one visible device each", "one each, local rank 0"],
)
def test_each_rank_uses_the_accelerator_of_its_local_rank_or_the_only_one_that_it_sees(
    uuids: list[list[str]], env: dict[str, str | None], indices: list[int]
) -> None:
    """The device is made current, once, and its registered backend is the default."""
    expected = [(f"{KIND}:{index}", [index], BACKEND) for index in indices]
    assert run_ranks(place, 2, args=(uuids, {}), env=env, timeout=150) == expected


def test_a_launcher_that_maps_the_devices_itself_has_put_the_ranks_own_first() -> None:
    """Index 0 whatever the local rank, on devices that differ."""
    uuids, options = [["a", "b"], ["c", "d"]], {"external_gpu_device_mapping": True}
    expected = [(f"{KIND}:0", [0], BACKEND)] * 2
    assert run_ranks(place, 2, args=(uuids, options)) == expected


def stream(rank: int, world_size: int, options: dict[str, Any]) -> int:
    accelerator = plug_in(["a"])
    with reloadpg.init_distributed(connect="none", **options):
        return len(accelerator.streams)


@pytest.mark.parametrize(
    ("options", "streams"),
    [({"stream": True}, 1), ({}, 0), ({"stream": True, "device": "cpu"}, 0)],
    ids=str,
)
def test_a_stream_for_graphs_is_made_current_if_it_is_asked_for(
    options: dict[str, Any], streams: int
) -> None:
    """A new one, on an accelerator."""
    assert run_ranks(stream, 1, args=(options,)) == [streams]


@pytest.mark.parametrize(
    ("uuids", "env", "index", "locals_"),
    [
        (TWO, {"LOCAL_RANK": "0"}, 0, "0, 0"),
        ([["a"], ["a"]], {}, 0, "0, 1"),
    ],
    ids=["local rank 0 twice", "one visible device twice"],
)
def test_two_ranks_that_share_a_device_are_told_so(
    uuids: list[list[str]], env: dict[str, str | None], index: int, locals_: str
) -> None:
    """On both ranks, before a group is made: device, ranks, local ranks."""
    for kind, message in run_ranks(place, 2, args=(uuids, {}), env=env, timeout=150):
        assert kind == "DisagreementError"
        assert f"{KIND}:{index} on host " in message
        assert f"is the device of rank 0-1, whose local ranks are {locals_}" in message


def see(rank: int, world_size: int, visible: list[str], index: int) -> tuple[str, str]:
    accelerator = plug_in(["", ""])  # hardware that does not say which it is
    os.environ["TOASTER_VISIBLE_DEVICES"] = visible[rank]
    try:
        device = f"{KIND}:{index if rank else 0}"
        with reloadpg.init_distributed(init_timeout=60, connect="none", device=device) as context:
            assert accelerator.used == [context.device.index]
            return str(context.device), ""
    except reloadpg.DisagreementError as error:
        return "DisagreementError", str(error)


@pytest.mark.parametrize(
    ("visible", "index", "shares"),
    [(["4,5", "6,7"], 0, False), (["4,5", "5,4"], 0, False), (["4,5", "5,4"], 1, True)],
)
def test_devices_without_an_identifier_are_told_apart_by_what_is_visible(
    visible: list[str], index: int, shares: bool
) -> None:
    """The same entry of the visible devices is the same device, at whatever index."""
    outcomes = run_ranks(see, 2, args=(visible, index))
    assert [outcome[0] == "DisagreementError" for outcome in outcomes] == [shares] * 2


def test_gloo_may_share_a_device() -> None:
    """A backend that moves data through the host claims none; NCCL beside it does."""
    cuda = torch.device("cuda:0")
    assert Placement(cuda, "gloo", None).exclusive() == ""
    assert Placement(cuda, "cpu:gloo,cuda:gloo", None).exclusive() == ""
    assert Placement(torch.device("cpu"), "cpu:gloo,cuda:nccl", None).exclusive() == ""


ELSEWHERE = {"MASTER_ADDR": "192.0.2.1", "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}

CHOICES: dict[str, tuple[dict[str, str | None], dict[str, Any], tuple[Any, ...] | str]] = {
    "default": ({}, {}, (f"{KIND}:0", [0], BACKEND)),
    "named device": ({}, {"device": f"{KIND}:1"}, (f"{KIND}:1", [1], BACKEND)),
    "named backend": ({}, {"backend": BACKEND}, (f"{KIND}:0", [0], BACKEND)),
    "gloo takes the CPU": ({}, {"backend": "gloo"}, ("cpu", [], "gloo")),
    "CPU takes gloo": ({}, {"device": "cpu"}, ("cpu", [], "gloo")),
    "a backend of other devices takes the CPU": (
        {},
        {"backend": "cpu:gloo"},
        ("cpu", [], "cpu:gloo"),
    ),
    "backend without CPU": (
        {},
        {"backend": BACKEND, "device": "cpu"},
        f"backend='{BACKEND}' does not serve device cpu",
    ),
    "NCCL on a CPU": ({}, {"backend": "nccl", "device": "cpu"}, "backend='nccl'"),
    "NCCL without its device": ({}, {"backend": "nccl"}, "backend='nccl'"),
    "no such device": ({}, {"device": f"{KIND}:2"}, f"2 {KIND} devices are visible"),
    "no such local rank": (
        {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"},
        {},
        f"local_rank=2 has no {KIND} device: 2 are visible",
    ),
    "unknown local rank": ({"WORLD_SIZE": "2", **ELSEWHERE}, {}, "LOCAL_RANK is not set"),
    "another device_id": ({}, {"device_id": 1}, "device_id="),
}


@pytest.mark.parametrize(("env", "options", "expected"), CHOICES.values(), ids=CHOICES)
def test_device_and_backend_follow_each_other_or_are_refused(
    env: dict[str, str | None], options: dict[str, Any], expected: tuple[Any, ...] | str
) -> None:
    """Each choice of one rank that sees two devices; what does not fit is named before bring-up."""
    [outcome] = run_ranks(place, 1, args=([["a", "b"]], options), env=env)
    if isinstance(expected, str):
        assert outcome[0] == "InvalidOptionError"
        assert expected in outcome[1]
    else:
        assert outcome == expected
