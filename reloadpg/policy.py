"""Which groups are made reloadable, and which of their backends are released."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from . import c10d
from .errors import InvalidOptionError

BYPASS = frozenset({"gloo", "mpi", "fake", "undefined"})
"""Backends that hold no device memory worth releasing: never reloadable unless named."""


@dataclass(frozen=True)
class Policy:
    """The choice of reloadable groups.

    Attributes:
        backends: backend names to make reloadable; None means every backend that serves an
            accelerator.
        min_size: smallest number of members; smaller groups are returned as torch made them.
        world: whether the default group is made reloadable too.
    """

    backends: frozenset[str] | None = None
    min_size: int = 2
    world: bool = True

    @classmethod
    def of(cls, backends: Iterable[str] | str | None, min_size: int, world: bool) -> Policy:
        """Validate the options of ``install``.

        Raises:
            InvalidOptionError: an unknown backend, an empty set, ``min_size`` below 1, or a
                ``world`` that is neither True nor False.
        """
        if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 1:
            raise InvalidOptionError(
                f"install(min_size={min_size!r}): the smallest group is one rank; nothing was "
                "installed. Pass an integer of 1 or more."
            )
        if not isinstance(world, bool):
            raise InvalidOptionError(
                f"install(world={world!r}): must be True or False; nothing was installed. Pass "
                "False to leave the default group as torch makes it."
            )
        if backends is None:
            return cls(None, min_size, world)
        names = frozenset([backends] if isinstance(backends, str) else backends)
        if not names:
            raise InvalidOptionError(
                "install(backends=()) would make no group reloadable; nothing was installed. "
                "Pass None for every accelerator backend, or name at least one."
            )
        known = c10d.known_backends()
        unknown = sorted(str(name) for name in names if str(name) not in known)
        if unknown:
            raise InvalidOptionError(
                f"install(backends=...): unknown backend {', '.join(unknown)}; nothing was "
                f"installed. Torch knows {', '.join(sorted(known))} here; register another with "
                "torch.distributed.Backend.register_backend first."
            )
        return cls(frozenset(str(name) for name in names), min_size, world)

    def selected(self, devices: Mapping[str, str], size: int) -> tuple[str, ...]:
        """The device types whose backend is released; empty if the group is to be left alone.

        Args:
            devices: backend by device type.
            size: number of members.
        """
        if size < self.min_size:
            return ()
        names = self.backends
        if names is None:
            names = frozenset(
                backend
                for device, backend in devices.items()
                if device != "cpu" and backend not in BYPASS
            )
        return tuple(device for device, backend in devices.items() if backend in names)
