"""Installation and removal of the patches."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ..c10d import nccl, tables
from ..errors import InvalidOptionError, PatchConflictError
from ..groups.loans import POLICIES
from ..groups.patches import Patches
from ..groups.registry import registry
from ..groups.selection import Selection
from ..groups.wrappers import manage_world
from ..settings import (
    IS_OFF,
    STRATEGIES,
    as_flag,
    as_integer,
    as_timedelta,
    install_options,
    refuse_unknown_variables,
)
from ..texts import counted, is_first_of_host, warn
from .callbacks import callbacks, is_new
from .installation import Options, installation
from .job import jobs
from .status import not_reloadable

logger = logging.getLogger("reloadpg")

observers: list[Callable[[], object]] = []
"""What each ``install`` calls at its end. The package adds what builds on this one."""

_DEFAULTS = {"strategy": Options.strategy, "timeout": Options.timeout, "exclude": ()}
"""Options of ``install`` where neither it nor the environment gives one."""


def install(
    *,
    backends: Iterable[str] | str | None = None,
    min_size: int = 2,
    world: bool = True,
    strategy: str | None = None,
    timeout: timedelta | float | None = None,
    parallelism: int | None = None,
    exclude: Iterable[str] | str | None = None,
    sets: Mapping[str | None, Iterable[str] | str] | Iterable[str] | str | None = None,
    recoverable: bool = False,
    borrowed: str = "refuse",
) -> None:
    """Make process groups reloadable from now on.

    Local. Call it with equal options on every rank, before the groups are created. Existing groups
    are unchanged, except the default group, which becomes reloadable. Idempotent for equal options;
    without options, also after an installation by ``RELOADPG_AUTOINSTALL``.

    An option that is None is read from ``RELOADPG_BACKENDS``, ``RELOADPG_EXCLUDE``,
    ``RELOADPG_STRATEGY`` or ``RELOADPG_TIMEOUT_S`` if that variable is set; otherwise it has the
    default below.

    With ``RELOADPG=off`` in the environment it changes nothing and logs one line. All operations
    then return at once, as without a default group; :func:`register_group` returns the plain group.

    Args:
        backends: names of the backends whose groups become reloadable; None means all that serve
            an accelerator. ``{"gloo"}`` makes gloo groups reloadable, for tests without a GPU.
        min_size: groups with fewer members bypass.
        world: whether the default group becomes reloadable too.
        strategy: how communicators are released, equal on all ranks. ``recreate`` (the default)
            destroys them and rebuilds them: all of their memory is released, with every backend.
            ``suspend`` keeps them and releases part of their memory (NCCL 2.29.7 and later). It is
            experimental: it has not run on a GPU. If any rank cannot suspend a group, all groups of
            that operation are recreated, and the report says which rank and why. If a suspend or a
            resume fails, or gives back too little, the job recreates its groups from then on.
        timeout: timeout of ``offload`` and ``reload``: how long they wait for other ranks and for a
            communicator while no rank makes progress; 5 minutes by default, at most a year. A
            number is in seconds. Time during which this process was stopped does not count.
        parallelism: number of groups that a rank releases, or creates and connects, in parallel.
            None means 8, and 1 for a backend other than gloo and NCCL: a backend that holds a lock
            of the process while it waits for other ranks could deadlock. Equal on all ranks. Each
            creating thread has a separate store client, so jobs of more than 2,048 ranks use fewer
            threads.
        exclude: a pattern (``fnmatch``), or several, of the description or name of groups that
            bypass, for example ``"*_SERVICE"``. Matched against the name and description at
            creation. Equal on all ranks.
        sets: the sets of groups other than ``"trainer"``. A name, or several: the groups of a set
            are created in a :class:`region` of its name. Or a mapping from each name to a pattern
            (``fnmatch``), or several, of the modules that create its groups, such as
            ``{"engine": "vllm.*"}``. The innermost caller of torch that matches a pattern decides,
            unless a region applies. All other groups are in ``"trainer"``; the default group always
            is. Groups that match the patterns under the key None bypass. Equal on all ranks.
        recoverable: make NCCL errors raise instead of ending the process, so that the program can
            call :func:`~reloadpg.recovery.recover`. Sets unset variables, such as
            ``TORCH_NCCL_ASYNC_ERROR_HANDLING=2`` (also overriding torchrun's default of 1), until
            :func:`uninstall`. With them, a collective that fails or times out is aborted and
            leaves wrong values without an error; :func:`offload` and
            :func:`~reloadpg.recovery.recovery_requested` detect this. It also makes
            ``connect="eager"`` the default of :func:`reload`.
        borrowed: what an offload does if other code has taken a pointer to a group's communicator,
            or a window, and could use it after the release. ``refuse`` (the default): the offload
            raises :class:`~reloadpg.errors.BorrowedError` before anything is changed, and names the
            holder, unless a callback of :func:`on_offload` for that group drops it. ``warn``: the
            group is released, and the report's warnings name the holder. ``ignore``: nothing is
            recorded. A suspended group keeps its communicator, so nothing is refused. See
            ``status().borrowed``. Equal on all ranks.

    Raises:
        InvalidOptionError: an option is invalid, or the environment has an unknown variable that
            begins with ``RELOADPG_``; with ``recoverable``, a variable has another value, or NCCL
            groups were created without these variables; torch uses TorchComms.
        PatchConflictError: already installed with other options.
        UnsupportedTorchError: the installed torch lacks names that this library uses.
    """
    if _put_in_place(_options(locals())):
        _warn_of_unmanaged()  # without the lock: programs can handle warnings themselves
    for observe in observers:
        observe()


def _options(given: Mapping[str, Any]) -> Options:
    """Return the given options, completed by the environment's and by the defaults."""
    passed = {name: value for name, value in given.items() if value is not None}
    read = {**given, **_DEFAULTS, **install_options(os.environ), **passed}
    selection = Selection.of(
        read["backends"],
        read["min_size"],
        read["world"],
        read["exclude"],
        read["sets"],
        registered_later=given["backends"] is None,
    )
    way = read["strategy"]
    if way not in STRATEGIES:
        raise InvalidOptionError(
            f"install(strategy={way!r}): unknown; nothing was installed. Use 'recreate', or "
            "'suspend', which recreates groups that cannot be suspended."
        )
    limit = as_timedelta(read["timeout"], "timeout", "nothing was installed")
    parallelism = read["parallelism"]
    threads = None if parallelism is None else as_integer(parallelism)
    if parallelism is not None and (threads is None or threads < 1):
        raise InvalidOptionError(
            f"install(parallelism={parallelism!r}): not a positive number; nothing was installed. "
            "Pass 1 to release groups one after the other."
        )
    recoverable = as_flag(read["recoverable"], "recoverable", "nothing was installed")
    borrowed = read["borrowed"]
    if borrowed not in POLICIES:
        raise InvalidOptionError(
            f"install(borrowed={borrowed!r}): it is {', '.join(POLICIES[:-1])} or {POLICIES[-1]}; "
            "nothing was installed."
        )
    return Options(selection, way, limit, threads, recoverable, borrowed)


def _put_in_place(options: Options) -> bool:
    """Apply the patches, unless they are in place; return whether they were applied."""
    refuse_unknown_variables(os.environ, "install")
    if registry.off:
        if is_first_of_host() and is_new(IS_OFF):
            logger.warning("%s: torch is unchanged, and no group is reloadable", IS_OFF)
        return False
    with registry.lock:
        in_place = installation.options
        if in_place is not None:
            if options == in_place:
                return False
            raise PatchConflictError(
                f"install was called again with other options: {_differences(options, in_place)}. "
                "Nothing was changed. Call reloadpg.uninstall() first, or install once with the "
                "options that the whole program needs. RELOADPG_AUTOINSTALL installs at import "
                "torch, with the options of the environment."
            )
        if obstacle := nccl.torchcomms_obstacle():
            raise InvalidOptionError(f"install: {obstacle}. Nothing was installed.")
        variables = _recovery_variables(options) if options.recoverable else {}
        installation.begin(options, Patches.apply(jobs.register), variables)
        try:
            if manage_world(None) is not None:
                jobs.register()
        except BaseException:
            installation.end()
            raise
        return True


def _differences(given: Options, in_place: Options) -> str:
    before = in_place.settings()
    return ", ".join(
        f"{name}={value!r} (in place: {before[name]!r})"
        for name, value in given.settings().items()
        if value != before[name]
    )


def uninstall() -> None:
    """Restore torch's functions at every name. Local; idempotent.

    Groups that were created during the installation keep working. They are not offloaded until
    the library is installed again.

    Raises:
        PatchConflictError: other code has wrapped a patched function, groups are offloaded, or an
            operation is running; nothing was changed.
    """
    with registry.lock:
        patches = installation.patches
        if patches is None:
            return
        if jobs.busy:
            raise PatchConflictError(
                "uninstall: an operation is running in this process. Nothing was changed. Call it "
                "after the operation has ended. After a call with wait=False, first call result()."
            )
        foreign = patches.foreign()
        if foreign:
            raise PatchConflictError(
                "uninstall: names that reloadpg patched were changed by other code since: "
                f"{'; '.join(foreign)}. Nothing was changed. Remove that wrapper first, then call "
                "reloadpg.uninstall() again."
            )
        offloaded = registry.offloaded()
        if offloaded:
            raise PatchConflictError(
                f"uninstall: {counted(len(offloaded), 'group')} without a communicator now, first "
                f"{offloaded[0]!r}. Nothing was changed. Call reloadpg.reload() on all ranks first."
            )
        installation.end()
    while callbacks.uninstall:
        callbacks.uninstall.pop()()


def select_world() -> bool:
    """Make the default group reloadable, also if it is created again. Local; idempotent.

    Returns:
        Whether the library is installed; otherwise nothing was changed.
    """
    with registry.lock:
        options = installation.options
        if options is not None:
            installation.reselect(replace(options.selection, world=True))
            if manage_world(None) is not None:
                jobs.register()
        return options is not None


def is_installed() -> bool:
    """Whether the patches are in place in this process. Local, at any time."""
    return installation.patches is not None


def _recovery_variables(options: Options) -> dict[str, tuple[str, str | None]]:
    """The variables to set, each with its earlier value."""
    missing, obstacles = nccl.recovery_settings(os.environ)
    if obstacles and nccl.nccl_is_concerned(options.selection.backends):
        raise InvalidOptionError(
            f"install(recoverable=True): {'; '.join(obstacles)}. Nothing was installed."
        )
    created = [
        tables.name_of(group)
        for group in tables.known_groups()
        if "nccl" in tables.device_backends(group).values()
    ]
    if missing and created:
        names = ", ".join(sorted(missing))
        raise InvalidOptionError(
            f"install(recoverable=True): NCCL groups ({', '.join(created)}) were already created "
            f"without {names}; nothing was installed. Install earlier, or set these variables "
            "before the process starts."
        )
    return {name: (value, os.environ.get(name)) for name, value in missing.items()}


def _warn_of_unmanaged() -> None:
    for text in not_reloadable():
        if is_new(text):  # the report of an offload has it too, and the log need not
            warn(f"reloadpg.install(): {text}")
