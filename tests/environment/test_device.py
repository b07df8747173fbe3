"""Device and backend of a rank, on an invented accelerator: a device module without devices.

Torch's own functions for accelerators of other makers (``rename_privateuse1_backend``,
``_register_device_module``, ``Backend.register_backend``) run as they are.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from helpers.in_turn import variables

import reloadpg
from reloadpg.environment.device import Placement
from reloadpg.testing import run_ranks

KIND, BACKEND = "toaster", "bread"


class Accelerator(types.ModuleType):
    """What torch and the library ask an accelerator's module; it records the current devices."""

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


@dataclass(frozen=True)
class Case:
    """A bring-up: what identifies the devices that each rank sees, variables, arguments."""

    uuids: list[list[str]]
    env: dict[str, str | None] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    own: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=lambda: [({}, {})] * 2)
    """Variables and arguments that each rank has for itself."""


@dataclass(frozen=True)
class Placed:
    """The result: the error, or device, backend, and the indices and streams in use."""

    error: str = ""
    device: str = ""
    used: tuple[int, ...] = ()
    backend: str = ""
    streams: int = 0


def place(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, Placed]:
    """By case, the result on this rank; one case after the other."""
    accelerator = plug_in([])
    placed = {}
    for name, case in cases.items():
        accelerator.uuids = case.uuids[rank]
        accelerator.used, accelerator.streams = [], []
        env, options = case.own[rank]
        options = {"init_timeout": 60, "connect": "none", **case.options, **options}
        if world_size == 1:  # asks for a group
            options["store"] = dist.HashStore()
        with variables({**case.env, **env}):
            try:
                with reloadpg.environment.init_distributed(**options) as context:
                    placed[name] = Placed(
                        device=str(context.device),
                        used=tuple(accelerator.used),
                        backend=dist.get_backend(),
                        streams=len(accelerator.streams),
                    )
            except (reloadpg.errors.InvalidOptionError, reloadpg.DisagreementError) as error:
                placed[name] = Placed(f"{type(error).__name__}: {error}")
            assert not dist.is_initialized()
    return placed


def on(index: int, streams: int = 0) -> Placed:
    """The accelerator's device of this index, made current once, with its default backend."""
    return Placed("", f"{KIND}:{index}", (index,), BACKEND, streams)


TWO = [["a", "b"], ["a", "b"]]
ONE_EACH = [["a"], ["b"]]
UNNAMED = [["", ""], ["", ""]]  # hardware that does not say which it is
DIFFERENT = [["a", "b"], ["c", "d"]]


def seen(first: str, second: str, index: int = 0) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """Ranks to which their launcher shows these devices; the second one uses this index."""
    return [
        ({"TOASTER_VISIBLE_DEVICES": first}, {"device": f"{KIND}:0"}),
        ({"TOASTER_VISIBLE_DEVICES": second}, {"device": f"{KIND}:{index}"}),
    ]


PAIRS: dict[str, tuple[Case, list[Placed] | str]] = {
    "local rank": (Case(TWO), [on(0), on(1)]),
    "env rendezvous: all are on this host": (
        Case(TWO, {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}),
        [on(0), on(1)],
    ),
    "one visible device each": (Case(ONE_EACH), [on(0), on(0)]),
    "one each, local rank 0": (Case(ONE_EACH, {"LOCAL_RANK": "0"}), [on(0), on(0)]),
    "the launcher has put the rank's own first": (
        Case(DIFFERENT, options={"external_gpu_device_mapping": True}),
        [on(0), on(0)],
    ),
    "local rank 0 twice": (
        Case(TWO, {"LOCAL_RANK": "0"}),
        "is the device of ranks 0-1, whose local ranks are 0, 0",
    ),
    "one visible device twice": (
        Case([["a"], ["a"]]),
        "is the device of ranks 0-1, whose local ranks are 0, 1",
    ),
    "other devices are visible": (Case(UNNAMED, own=seen("4,5", "6,7")), [on(0), on(0)]),
    "other order": (Case(UNNAMED, own=seen("4,5", "5,4")), [on(0), on(0)]),
    "other order and index, the same entry": (
        Case(UNNAMED, own=seen("4,5", "5,4", index=1)),
        "is the device of ranks 0-1",
    ),
}


def test_each_rank_gets_a_separate_device_or_an_error_with_the_ranks_that_share_it() -> None:
    """It is that of the local rank, or the only visible one, made current once, with its backend.

    A shared device is reported before a group is created.
    """
    cases = {name: case for name, (case, _) in PAIRS.items()}
    results = run_ranks(place, 2, args=(cases,), timeout=150)
    for name, (_, expected) in PAIRS.items():
        found = [placed[name] for placed in results]
        if not isinstance(expected, str):
            assert found == expected, name
            continue
        for placed in found:
            assert placed.error.startswith("DisagreementError"), name
            assert f"{KIND}:0 on host " in placed.error, name
            assert expected in placed.error, name


def test_gloo_may_share_a_device() -> None:
    """A backend that moves data through the host claims none; NCCL in a mixed group does."""
    cuda = torch.device("cuda:0")
    assert Placement(cuda, "gloo", None).exclusive() == ""
    assert Placement(cuda, "cpu:gloo,cuda:gloo", None).exclusive() == ""
    assert Placement(torch.device("cpu"), "cpu:gloo,cuda:nccl", None).exclusive() == ""


ELSEWHERE = {"MASTER_ADDR": "192.0.2.1", "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}

CHOICES: dict[str, tuple[dict[str, str | None], dict[str, Any], Placed | str]] = {
    "default": ({}, {}, on(0)),
    "named device": ({}, {"device": f"{KIND}:1"}, on(1)),
    "named backend": ({}, {"backend": BACKEND}, on(0)),
    "a stream": ({}, {"stream": True}, on(0, streams=1)),
    "no stream on a CPU": (
        {},
        {"stream": True, "device": "cpu"},
        Placed(device="cpu", backend="gloo"),
    ),
    "gloo takes the CPU": ({}, {"backend": "gloo"}, Placed(device="cpu", backend="gloo")),
    "CPU takes gloo": ({}, {"device": "cpu"}, Placed(device="cpu", backend="gloo")),
    "a backend of other devices takes the CPU": (
        {},
        {"backend": "cpu:gloo"},
        Placed(device="cpu", backend="cpu:gloo"),
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
    "the rank's device_id": ({}, {"device_id": 0}, on(0)),
    "another device_id": ({}, {"device_id": 1}, "device_id="),
    "the CPU as device_id": (
        {},
        {"device": "cpu", "device_id": torch.device("cpu")},
        "device_id='cpu' is not this rank's accelerator",
    ),
}


def test_the_device_determines_the_backend_and_the_backend_the_device() -> None:
    """For one rank with two visible devices. What does not fit is refused before bring-up."""
    cases = {n: Case([["a", "b"]], env, options) for n, (env, options, _) in CHOICES.items()}
    [alone] = run_ranks(place, 1, args=(cases,), timeout=150)
    for name, (_, _, expected) in CHOICES.items():
        if isinstance(expected, str):
            assert alone[name].error.startswith("InvalidOptionError"), name
            assert expected in alone[name].error, name
        else:
            assert alone[name] == expected, name
