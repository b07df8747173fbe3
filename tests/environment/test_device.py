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
from reloadpg.testing import run_ranks

KIND, BACKEND = "toaster", "bread"


class Accelerator(types.ModuleType):
    """What torch and the library ask an accelerator's module; it records the current devices."""

    def __init__(self) -> None:
        super().__init__(f"torch.{KIND}")
        self.devices = 0
        self.used: list[int] = []

    def is_available(self) -> bool:
        return self.devices > 0

    def is_initialized(self) -> bool:
        return False

    def device_count(self) -> int:
        return self.devices

    def set_device(self, index: int) -> None:
        self.used.append(index)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...


def _create(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def plug_in() -> Accelerator:
    accelerator = Accelerator()
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, accelerator)
    dist.Backend.register_backend(BACKEND, _create, devices=[KIND])
    return accelerator


@dataclass(frozen=True)
class Case:
    """A bring-up: the number of devices that each rank sees, variables, arguments."""

    devices: int
    env: dict[str, str | None] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Placed:
    """The result: the error, or device, indices that were made current, and backend."""

    error: str = ""
    device: str = ""
    used: tuple[int, ...] = ()
    backend: str = ""


def place(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, Placed]:
    """By case, the result on this rank; one case after the other."""
    accelerator = plug_in()
    placed = {}
    for name, case in cases.items():
        accelerator.devices, accelerator.used = case.devices, []
        options = {"init_timeout": 60, "connect": "none", **case.options}
        if world_size == 1:  # asks for a group
            options["mesh_dims"] = {}
        with variables(case.env):
            try:
                with reloadpg.environment.init_distributed(**options) as context:
                    used = tuple(accelerator.used)
                    bound = context.device if "bind" in case.options else None
                    assert dist.group.WORLD.bound_device_id == bound
                    placed[name] = Placed("", str(context.device), used, dist.get_backend())
            except reloadpg.errors.InvalidOptionError as error:
                placed[name] = Placed(f"{type(error).__name__}: {error}")
            assert not dist.is_initialized()
    return placed


def on(index: int) -> Placed:
    """The accelerator's device of this index, made current once, with its default backend."""
    return Placed("", f"{KIND}:{index}", (index,), BACKEND)


PAIRS: dict[str, tuple[Case, list[Placed]]] = {
    "local rank": (Case(2), [on(0), on(1)]),
    "env rendezvous: all are on this host": (
        Case(2, {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}),
        [on(0), on(1)],
    ),
    "one visible device each": (Case(1), [on(0), on(0)]),
    "the launcher has put the rank's own first": (
        Case(2, options={"device": f"{KIND}:0"}),
        [on(0), on(0)],
    ),
}


def test_each_rank_gets_the_device_of_its_local_rank_or_the_only_visible_one() -> None:
    """Or the one that it names; made current once, with its backend."""
    cases = {name: case for name, (case, _) in PAIRS.items()}
    results = run_ranks(place, 2, args=(cases,), timeout=150)
    for name, (_, expected) in PAIRS.items():
        assert [placed[name] for placed in results] == expected, name


ELSEWHERE = {"MASTER_ADDR": "192.0.2.1", "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}

CHOICES: dict[str, tuple[dict[str, str | None], dict[str, Any], Placed | str]] = {
    "default": ({}, {}, on(0)),
    "named backend": ({}, {"backend": BACKEND}, on(0)),
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
    "no pairs": ({}, {"backend": "cpu:gloo,cuda"}, "neither one name nor device:name pairs"),
    "no such device": ({}, {"device": f"{KIND}:2"}, f"2 {KIND} devices are visible"),
    "no such local rank": (
        {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"},
        {},
        f"local_rank=2 has no {KIND} device: 2 are visible",
    ),
    "bound": ({}, {"bind": True}, on(0)),
    "unknown local rank": ({"WORLD_SIZE": "2", **ELSEWHERE}, {}, "LOCAL_RANK is not set"),
}


def test_the_device_determines_the_backend_and_the_backend_the_device() -> None:
    """For one rank with two visible devices. What does not fit is refused before bring-up."""
    cases = {n: Case(2, env, options) for n, (env, options, _) in CHOICES.items()}
    [alone] = run_ranks(place, 1, args=(cases,), timeout=150)
    for name, (_, _, expected) in CHOICES.items():
        if isinstance(expected, str):
            assert alone[name].error.startswith("InvalidOptionError"), name
            assert expected in alone[name].error, name
        else:
            assert alone[name] == expected, name
