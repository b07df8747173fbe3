"""Installation of the patches, and its undoing."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType

from ..errors import InvalidOptionError, PatchConflictError
from ..groups.patches import Patches
from ..groups.registry import Options, registry
from ..groups.selection import Selection, StrategyPolicy
from ..groups.wrappers import manage_world

__all__ = ["Installation", "install", "is_installed", "uninstall"]

MAX_TIMEOUT = timedelta(days=365)
"""Longer ones overflow somewhere between Python, C++ and the store."""


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
    timeout: timedelta | float = timedelta(minutes=5),
    parallelism: int = Options.parallelism,
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
        timeout: how long ``offload`` and ``reload`` wait for other ranks, and for a group's own
            communicator, while no rank makes progress; at most a year. A number is in seconds.
        parallelism: how many groups a rank releases, or connects after a reload, side by side; 1
            for one after the other. Equal on all ranks.

    Returns:
        A handle; as a context manager it uninstalls at the end of the block.

    Raises:
        InvalidOptionError: an option cannot be used.
        PatchConflictError: installed already with other options.
    """
    if isinstance(parallelism, bool) or not isinstance(parallelism, int) or parallelism < 1:
        raise InvalidOptionError(
            f"install(parallelism={parallelism!r}): not a positive number; nothing was installed. "
            "Pass 1 to release groups one after the other."
        )
    selection, chosen = Selection.of(backends, min_size, world), StrategyPolicy.of(strategy)
    options = Options(selection, chosen, _bound(timeout), parallelism)
    with registry.lock:
        if registry.patches is not None:
            if registry.options == options:
                _tell_of_installation()
                return Installation(options, owner=False)
            raise PatchConflictError(
                f"install was called again with other options ({options}); in place: "
                f"{registry.options}. Nothing was changed. Call reloadpg.uninstall() first, or "
                "install once with the options that all of the program needs."
            )
        patches = Patches.apply()
        registry.options, registry.patches = options, patches
        try:
            manage_world(None)
        except BaseException:
            patches.undo()
            registry.options = registry.patches = None
            raise
        _warn_of_unmanaged()
        _tell_of_installation()
        return Installation(options, owner=True)


def _bound(timeout: timedelta | float) -> timedelta:
    with suppress(TypeError, ValueError, OverflowError):
        given = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if timedelta(0) < given <= MAX_TIMEOUT and not isinstance(timeout, bool):
            return given
    raise InvalidOptionError(
        f"install(timeout={timeout!r}): not a positive timedelta, or number of seconds, of at most "
        f"{MAX_TIMEOUT.days} days; nothing was installed. Pass for example "
        "timeout=timedelta(minutes=5)."
    )


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


def _tell_of_installation() -> None:
    for callback in list(registry.callbacks.install):
        callback()


def _warn_of_unmanaged() -> None:
    unmanaged = registry.unmanaged()
    if unmanaged:
        warnings.warn(
            f"{len(unmanaged)} process groups were created before reloadpg.install() and will keep "
            "their communicators while the others are offloaded. Install before creating groups.",
            stacklevel=3,
        )
