"""Patch the functions that create groups, at every name they are bound to, and undo it.

``new_group``, ``split_group`` and ``init_process_group`` are patched, with one wrapper each, and
before torch 2.15 ``batch_isend_irecv`` (see ``batching``).
The wrapper is put at every name that held torch's own function: in ``torch.distributed`` and its
modules, and in any loaded module that imported it early (found by identity in ``sys.modules``).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType, TracebackType
from typing import Any

import wrapt

from . import batching, c10d
from .adoption import WRAPPERS, adopt_world
from .choice import StrategyPolicy
from .errors import InvalidOptionError, PatchConflictError
from .group import ReloadableProcessGroup
from .observability import startup
from .policy import Policy
from .registry import Options, registry

__all__ = ["Installation", "Patches", "install", "is_installed", "uninstall"]


@dataclass(frozen=True)
class _Patch:
    """One name that was changed."""

    owner: ModuleType
    attribute: str
    original: Any
    replacement: Any

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.attribute}"


@dataclass
class Patches:
    """All names that were changed, in order."""

    patches: list[_Patch] = field(default_factory=list)

    @classmethod
    def apply(cls) -> Patches:
        """Put the wrappers in place everywhere, or change nothing.

        A wrapper that somebody else has put over a creating function stays below ours, and torch's
        function gets one of ours too at the names that the other one left out.
        """
        wrappers: dict[int, tuple[Any, Any]] = {}
        for name, replacement in {**WRAPPERS, **batching.wrappers()}.items():
            for original in _originals(name):
                wrapper = wrapt.FunctionWrapper(original, replacement)
                wrappers[id(original)] = (original, wrapper)
        found = [
            _Patch(owner, attribute, *wrappers[key])
            for owner, attribute, key in _bindings(wrappers)
        ]
        applied = cls()
        try:
            for patch in found:
                setattr(patch.owner, patch.attribute, patch.replacement)
                applied.patches.append(patch)
        except Exception:
            applied.undo()
            raise
        return applied

    def foreign(self) -> list[str]:
        """The changed names that no longer hold our wrapper, with what they hold."""
        return [
            f"{patch} is {now!r}"
            for patch in self.patches
            if (now := vars(patch.owner).get(patch.attribute)) is not patch.replacement
            and sys.modules.get(patch.owner.__name__) is patch.owner
        ]

    def undo(self) -> None:
        """Put the originals back: at the names changed, and where ours was imported since."""
        replaced = {id(patch.replacement): patch.original for patch in self.patches}
        for owner, attribute, key in list(_bindings(replaced)):
            setattr(owner, attribute, replaced[key])
        self.patches.clear()


def _originals(name: str) -> list[Any]:
    """What torch's modules bind to the name, and what that wraps."""
    found: list[Any] = []
    for home in c10d.creator_modules():
        value = vars(home).get(name)
        while value is not None and all(value is not other for other in found):
            found.append(value)
            value = getattr(value, "__wrapped__", None)
    return found


def _bindings(targets: Iterable[int]) -> Iterator[tuple[ModuleType, str, int]]:
    """Every name in every loaded module that is bound to one of the objects with these ids.

    Reads module dictionaries only: a module with a hostile ``__getattr__`` or ``__dir__`` is not
    asked anything. A quick set test skips the modules that hold none, which is nearly all.
    """
    ids = frozenset(targets)
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        names = module.__dict__
        if ids.isdisjoint(map(id, list(names.values()))):
            continue
        for attribute, value in list(names.items()):
            if id(value) in ids:
                yield module, attribute, id(value)


class Installation:
    """Handle on an installation; as a context manager it uninstalls at the end.

    A second ``install`` with equal options returns a handle that owns nothing: leaving its block
    leaves the first installation in place.
    """

    def __init__(self, options: Options, *, owner: bool) -> None:
        self.options = options
        self._owner = owner

    def uninstall(self) -> None:
        """Like :func:`uninstall`, if this handle's ``install`` made the installation."""
        if self._owner:
            uninstall()
            self._owner = False

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.uninstall()


def install(
    *,
    backends: Iterable[str] | str | None = None,
    min_size: int = 2,
    world: bool = True,
    strategy: str | StrategyPolicy = "recreate",
    timeout: timedelta = timedelta(minutes=5),
) -> Installation:
    """Make process groups reloadable from now on.

    Local; call it alike on every rank, before the groups are created. Groups that exist already
    stay as they are, except the default group, which is taken over. Idempotent for equal options.

    Args:
        backends: names of the backends whose groups become reloadable; None means all that serve
            an accelerator. ``{"gloo"}`` makes gloo groups reloadable, for tests without a GPU.
        min_size: groups of fewer members are left as torch makes them.
        world: whether the default group becomes reloadable too.
        strategy: how communicators are released: ``recreate`` (destroyed and built again),
            ``suspend`` (kept, their memory given back; NCCL 2.29.7 and later), ``auto`` (decided
            for each group), or a :class:`StrategyPolicy` with more to say.
        timeout: bound of every wait for other ranks in ``offload`` and ``reload``.

    Returns:
        A handle; as a context manager it uninstalls at the end of the block.

    Raises:
        InvalidOptionError: an option cannot be used.
        PatchConflictError: installed already with other options.
    """
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise InvalidOptionError(
            f"install(timeout={timeout!r}): not a positive timedelta; nothing was installed. "
            "Pass for example timeout=timedelta(minutes=5)."
        )
    chosen = StrategyPolicy.of(strategy)
    options = Options(Policy.of(backends, min_size, world), chosen, timeout)
    with registry.lock:
        if registry.patches is not None:
            if registry.options == options:
                startup.start()
                return Installation(options, owner=False)
            raise PatchConflictError(
                f"install was called again with other options ({options}); in place: "
                f"{registry.options}. Nothing was changed. Call reloadpg.uninstall() first, or "
                "install once with the options that all of the program needs."
            )
        patches = Patches.apply()
        registry.options, registry.patches = options, patches
        try:
            adopt_world(None)
        except BaseException:
            patches.undo()
            registry.options = registry.patches = None
            raise
        _warn_of_existing(options)
        startup.start()
        return Installation(options, owner=True)


def uninstall() -> None:
    """Put torch's own functions back at every name. Local; idempotent.

    Groups made meanwhile stay valid objects and go on working, but are not offloaded any more
    until the library is installed again.

    Raises:
        PatchConflictError: somebody has put a wrapper over ours, or groups are offloaded; nothing
            was changed.
    """
    with registry.lock:
        patches = registry.patches
        if patches is None:
            return
        foreign = patches.foreign()
        if foreign:
            raise PatchConflictError(
                "uninstall: names that reloadpg patched were changed by somebody else since: "
                f"{'; '.join(foreign)}. Nothing was changed. Remove that wrapper first, then call "
                "reloadpg.uninstall() again."
            )
        offloaded = registry.offloaded()
        if offloaded:
            raise PatchConflictError(
                f"uninstall: {len(offloaded)} groups own no communicator now, first "
                f"{offloaded[0]!r}. Nothing was changed. Call reloadpg.reload() on all ranks first."
            )
        patches.undo()
        registry.options = registry.patches = None


def is_installed() -> bool:
    """Whether the patches are in place in this process. Local, at any time."""
    return registry.patches is not None


def _warn_of_existing(options: Options) -> None:
    missed = [
        group
        for group in c10d.known_groups()
        if not isinstance(group, ReloadableProcessGroup)
        and group is not c10d.world()
        and options.policy.selected(c10d.device_backends(group), group.size())
    ]
    if missed:
        warnings.warn(
            f"{len(missed)} process groups were created before reloadpg.install() and will keep "
            "their communicators while the others are offloaded. Install before creating groups.",
            stacklevel=3,
        )
