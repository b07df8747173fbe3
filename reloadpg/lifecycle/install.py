"""Installation of the patches, and its undoing."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from .. import _TESTED_TORCH, c10d
from ..errors import (
    InvalidOptionError,
    PatchConflictError,
    as_timedelta,
    counted,
    refuse_unknown_variables,
)
from ..groups.patches import Patches
from ..groups.registry import Options, registry
from ..groups.selection import Selection, StrategyPolicy
from ..groups.wrappers import manage_world
from .operation import settings_of

__all__ = ["Installation", "install", "install_by_environment", "is_installed", "uninstall"]

logger = logging.getLogger("reloadpg")


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
    exclude: Iterable[str] | str = (),
    recoverable: bool = False,
) -> Installation:
    """Make process groups reloadable from now on.

    Local; call it alike on every rank, before the groups are created. Groups that exist already
    stay as they are, except the default group, which is taken over. Idempotent for equal options;
    without options also where the environment installed first (``RELOADPG_AUTOINSTALL``).

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
            Time in which this process was stopped does not count.
        parallelism: how many groups a rank releases, or creates and connects in a reload, side by
            side; 1 for one after the other. Equal on all ranks. Each creating thread has a store
            client of its own, so in jobs of more than 2,048 ranks fewer create.
        exclude: a pattern (``fnmatch``), or several, of the description or name of groups that
            are left as torch makes them, for example ``"*_SERVICE"``. The name and description
            at their creation count. Equal on all ranks.
        recoverable: whether to see to it that a fault of an NCCL communicator reaches the program,
            which can then call :func:`recover`, instead of ending the process: sets variables such
            as ``TORCH_NCCL_BLOCKING_WAIT`` that are unset, until :func:`uninstall`. With them, each
            ``wait()`` of a collective blocks the process until it is done. Each process leaves a
            mark in the job's store, by which one that replaces it knows it (:func:`rejoin`).

    Returns:
        A handle; as a context manager it uninstalls at the end of the block.

    Raises:
        InvalidOptionError: an option cannot be used, or the environment has a variable that
            begins with ``RELOADPG_`` and is unknown; with ``recoverable``, a variable is set
            otherwise, or NCCL groups exist that were created without.
        PatchConflictError: installed already with other options.
    """
    selection = Selection.of(backends, min_size, world, exclude)
    return _install(
        _options(selection, strategy, timeout, parallelism, recoverable), by_environment=False
    )


def install_by_environment(
    *, backends: Iterable[str] | None = None, exclude: Iterable[str] = (), **options: Any
) -> Installation:
    """Install with what the environment says: :func:`install` at the end of ``import torch``.

    Local; idempotent. ``backends`` may have names that are registered with torch later; one that
    still is not when the default group is created is warned of.

    Raises:
        InvalidOptionError, PatchConflictError: as for :func:`install`.
    """
    selection = Selection.of(backends, 2, True, exclude, registered_later=True)
    return _install(_options(selection, **options), by_environment=True)


def _options(
    selection: Selection,
    strategy: str | StrategyPolicy = "recreate",
    timeout: timedelta | float = timedelta(minutes=5),
    parallelism: int = Options.parallelism,
    recoverable: bool = False,
) -> Options:
    if isinstance(parallelism, bool) or not isinstance(parallelism, int) or parallelism < 1:
        raise InvalidOptionError(
            f"install(parallelism={parallelism!r}): not a positive number; nothing was installed. "
            "Pass 1 to release groups one after the other."
        )
    return Options(
        selection,
        StrategyPolicy.of(strategy),
        as_timedelta(timeout, "timeout", "nothing was installed"),
        parallelism,
        recoverable,
    )


def _install(options: Options, *, by_environment: bool) -> Installation:
    refuse_unknown_variables(os.environ, "install")
    with registry.lock:
        in_place = registry.options
        if registry.patches is not None and in_place is not None:
            plain = registry.by_environment and options == _options(Selection())
            if options == in_place or plain:
                if options != in_place:
                    logger.info("install() without options: %s", _BY_ENVIRONMENT)
                _tell_of_installation()
                return Installation(in_place, owner=False)
            raise PatchConflictError(
                f"install was called again with other options: {_differences(options, in_place)}. "
                f"{f'In place: {_BY_ENVIRONMENT}. ' if registry.by_environment else ''}Nothing was "
                "changed. Call reloadpg.uninstall() first, or install once with the options that "
                "all of the program needs."
            )
        variables = _recovery_variables(options) if options.recoverable else {}
        patches = Patches.apply()
        registry.options, registry.patches = options, patches
        registry.by_environment = by_environment
        registry.variables = variables
        os.environ.update(variables)
        try:
            manage_world(None)
        except BaseException:
            patches.undo()
            _unset_variables()
            registry.options = registry.patches = None
            raise
        _warn_of_torch()
        _warn_of_unmanaged()
        _tell_of_installation()
        return Installation(options, owner=True)


_BY_ENVIRONMENT = "RELOADPG_AUTOINSTALL installed at import torch, with the environment's options"


def _differences(given: Options, in_place: Options) -> str:
    """The options that differ: what is given, and what is in place."""
    before = settings_of(in_place)
    return ", ".join(
        f"{name}={value!r} (in place: {before[name]!r})"
        for name, value in settings_of(given).items()
        if value != before[name]
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
                f"uninstall: {counted(len(offloaded), 'group')} without a communicator now, first "
                f"{offloaded[0]!r}. Nothing was changed. Call reloadpg.reload() on all ranks first."
            )
        patches.undo()
        _unset_variables()
        registry.options = registry.patches = None
        registry.by_environment = False
        while registry.callbacks.uninstall:
            registry.callbacks.uninstall.pop()()


def is_installed() -> bool:
    """Whether the patches are in place in this process. Local, at any time."""
    return registry.patches is not None


def _recovery_variables(options: Options) -> dict[str, str]:
    """Return the variables to set, or refuse."""
    missing, obstacles = c10d.recovery_settings(os.environ, options.timeout.total_seconds())
    if obstacles:
        raise InvalidOptionError(
            f"install(recoverable=True): {'; '.join(obstacles)}. Nothing was installed."
        )
    made = [
        c10d.name_of(group)
        for group in c10d.known_groups()
        if "nccl" in c10d.device_backends(group).values()
    ]
    if missing and made:
        names = ", ".join(sorted(missing))
        raise InvalidOptionError(
            f"install(recoverable=True): NCCL groups were created before ({', '.join(made)}), "
            f"without {names}; nothing was installed. Install earlier, or set these variables "
            "before the process starts."
        )
    return missing


def _unset_variables() -> None:
    variables, registry.variables = registry.variables, {}
    for name, value in variables.items():
        if os.environ.get(name) == value:
            del os.environ[name]


def _tell_of_installation() -> None:
    for callback in list(registry.callbacks.install):
        callback()


def _warn_of_torch() -> None:
    """Warn, once a process, of a torch that this version was not tested with."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    oldest, newest = _TESTED_TORCH
    if found is None or oldest <= (int(found[1]), int(found[2])) <= newest:
        return
    if "torch version" not in registry.warned:
        registry.warned.add("torch version")
        tested = f"{'.'.join(map(str, oldest))} to {'.'.join(map(str, newest))}"
        warnings.warn(
            f"torch {torch.__version__} is not supported: reloadpg was tested with {tested}. It "
            "was installed all the same; run an offload and a reload of your own job before you "
            "rely on it.",
            stacklevel=4,
        )


def _warn_of_unmanaged() -> None:
    """Warn of groups that were created before this installation, by name."""
    unmanaged = [group for group, _ in registry.unmanaged()]
    if unmanaged:
        names = ", ".join(c10d.label_of(group) for group in unmanaged[:_NAMED])
        more = f" and {len(unmanaged) - _NAMED} more" if len(unmanaged) > _NAMED else ""
        warnings.warn(
            f"created before reloadpg.install(): {counted(len(unmanaged), 'process group')} "
            f"({names}{more}), which will keep communicators while others are offloaded. Install "
            "before creating groups.",
            stacklevel=4,
        )


_NAMED = 8
"""Groups that a message names."""
