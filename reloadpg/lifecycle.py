"""offload and reload: the lifecycle of a job's reloadable groups.

Both operations are rounds (see ``rendezvous``): all ranks agree before anything is touched, do
their part, and end with the same verdict. A failure before the first group is touched leaves
everything as it was; a failure afterwards leaves every group of the job without a communicator
and in state ``failed``, on all ranks alike, and ``reload()`` called again rebuilds them all.
"""

from __future__ import annotations

import gc
import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from . import devices
from .connect import Connect, connect_group, validate
from .construction import Construction
from .errors import InvalidOptionError, NotInstalledError
from .group import GroupState, ReloadableProcessGroup
from .operation import Operation, gates_of
from .plans import Offer
from .registry import Options, registry
from .report import Report
from .strategies import RECREATE, discard
from .supervised import Attempt
from .suspending import Suspension

__all__ = ["offload", "offload_noting", "on_offload", "on_reload", "on_report", "reload"]

logger = logging.getLogger("reloadpg")

Callback = TypeVar("Callback", bound=Callable[..., object])

# ---------------------------------------------------------------------------------------------
# public functions


def offload(*, collect: bool = False) -> Report:
    """Release the communicators of all reloadable groups of this job.

    Collective over all ranks of the job; blocking, each wait bounded by the ``timeout`` given to
    ``install``; idempotent (with everything offloaded already it only meets the other ranks).
    When it returns, the memory is free on all ranks. Waits for this rank's accelerator work; call
    it from one thread, with no collective in flight. The groups stay valid objects: queries
    answer, collectives raise ``GroupOffloadedError`` until :func:`reload`. Gloo groups that
    bypass, and the CPU side of mixed groups, go on working.

    Before ``init_process_group`` and after ``destroy_process_group`` it does nothing.

    Args:
        collect: also run a full garbage collection, for communicators that are held by cycles
            in the caller's code. It costs tens to hundreds of milliseconds in a large process.

    Returns:
        What was done on this rank.

    Raises:
        NotInstalledError: ``install`` was not called.
        DisagreementError: the ranks do not ask for the same; nothing was changed.
        RendezvousTimeoutError: ranks are missing; it names them.
        PeerFailedError: another rank failed; it names it.
        ReleaseError: a group could not be released on this rank.
    """
    return offload_noting([], collect=collect)


def offload_noting(completed: list[bool], *, collect: bool = False) -> Report:
    """:func:`offload`; notes that it is complete on all ranks, also if it is interrupted then."""
    return _operate("offload", lambda run: _offload(run, collect, completed))


def reload(*, connect: Connect = "none") -> Report:
    """Build the communicators of all offloaded groups again, behind the same objects.

    Collective over all ranks of the job; blocking, each wait bounded by the ``timeout`` given to
    ``install``; idempotent; may be called again after a failure. WORLD comes first, then the
    groups in one order that all ranks share, parents before their splits. Each is made by
    torch's original function with the arguments captured at its creation, and then gets what was
    set on it afterwards (timeouts, description). Groups that the user destroyed stay destroyed.

    Args:
        connect: ``none`` leaves each communicator to connect in its first collective;
            ``eager`` connects all rebuilt ones now, in one order that all ranks share, with an
            all-reduce of two numbers each; ``canary`` also checks that sum. Equal on all ranks.

    Returns:
        What was done on this rank.

    Raises:
        NotInstalledError: ``install`` was not called.
        DisagreementError: the ranks do not ask for the same; nothing was changed.
        RendezvousTimeoutError: ranks are missing; it names them.
        PeerFailedError: another rank failed; it names it.
        RebuildError: a group could not be built or connected on this rank; the cause is chained.
        InsufficientMemoryError: no room here to resume suspended communicators; nothing was
            changed on any rank.
        InvalidOptionError: ``connect`` is none of the three.
    """
    how = validate(connect)
    return _operate("reload", lambda run: _reload(run, how))


def on_offload(callback: Callable[[], object], *, name: str = "") -> Callable[[], None]:
    """Call something before groups are released: where other libraries' buffers go first.

    Local; callbacks run in the order of registration, in the caller's thread, on every offload
    that has something to release. One that raises makes the offload fail on all ranks before any
    group is touched. A group that a callback creates is not released by this offload.

    Returns:
        A function that takes the callback off again; idempotent.

    Raises:
        InvalidOptionError: the callback cannot be called; nothing was registered.
    """
    return _register(registry.callbacks.offload, _callable(callback, "on_offload"), name)


def on_reload(
    callback: Callable[[], object], *, name: str = "", before: bool = False
) -> Callable[[], None]:
    """Call something after all groups are live again on all ranks, or before any is rebuilt.

    Local; callbacks run in the order of registration, in the caller's thread, on every reload of
    offloaded groups. One that raises makes the reload fail on all ranks; ``reload()`` can be
    called again.

    Args:
        callback: what to call.
        name: for messages; by default the callback's own.
        before: call it before anything is rebuilt: if it raises, the groups stay offloaded.

    Returns:
        A function that takes the callback off again; idempotent.

    Raises:
        InvalidOptionError: the callback cannot be called; nothing was registered.
    """
    callbacks = registry.callbacks.before_reload if before else registry.callbacks.reload
    return _register(callbacks, _callable(callback, "on_reload"), name)


def on_report(callback: Callable[[Report], object]) -> Callable[[], None]:
    """Call something with the report of each offload and reload, also of one that failed.

    Local; in the caller's thread, at the end of the operation. What it raises is logged.

    Returns:
        A function that takes the callback off again; idempotent.

    Raises:
        InvalidOptionError: the callback cannot be called; nothing was registered.
    """
    callbacks = registry.callbacks.report
    callbacks.append(_callable(callback, "on_report"))

    def remove() -> None:
        callbacks[:] = [other for other in callbacks if other is not callback]

    return remove


# ---------------------------------------------------------------------------------------------
# one operation


def _operate(operation: str, body: Callable[[Operation], Report]) -> Report:
    started = time.perf_counter()
    options = registry.options
    if options is None:
        raise NotInstalledError(
            f"{operation}() was called and nothing is installed; nothing was changed. Call "
            "reloadpg.install() before the process groups are created."
        )
    reports: list[Report] = []
    try:
        with registry.exclusively(operation):
            return _run(operation, options, started, body, reports)
    finally:
        for report in reports:
            _publish(report)


def _run(
    operation: str,
    options: Options,
    started: float,
    body: Callable[[Operation], Report],
    reports: list[Report],
) -> Report:
    """The operation; its report, which stands in ``reports`` too, also if this raises."""
    job = registry.job(operation)
    if job is None:
        return Report(operation, False, 0, note="torch.distributed is not initialized")
    gates = gates_of(operation, options.strategy.may_suspend)
    if operation == "reload" and not job.released:
        gates = gates[:1]  # with nothing offloaded it ends when all ranks say so
    run = Operation(
        job,
        options,
        job.rendezvous.open(operation, gates, options.timeout.total_seconds()),
        registry.managed(),
        started,
    )
    job.last_error = ""
    try:
        report = body(run)
    except BaseException as error:
        job.last_error = f"{type(error).__name__}: {error}"
        reports.append(run.report(error=error))
        raise
    reports.append(report)
    return report


def _publish(report: Report) -> None:
    """Log a report and hand it to all who asked for it; their errors stay here."""
    logger.log(logging.ERROR if report.error else logging.INFO, "%s", report)
    for warning in report.warnings:
        kind = re.sub(r"\d[\d.]*", "#", warning)  # the same with other figures is not news
        first = kind not in registry.warned
        registry.warned.add(kind)
        logger.log(logging.WARNING if first else logging.DEBUG, "%s: %s", report.operation, warning)
    for callback in list(registry.callbacks.report):
        try:
            callback(report)
        except Exception:
            logger.exception("a callback registered with reloadpg.on_report failed")


def _offload(run: Operation, collect: bool, noted: list[bool]) -> Report:
    job, first, suspension = run.job, not run.job.released, Suspension(run)
    cycles = job.cycles + first
    live = [group for group in reversed(run.groups) if group.is_live]

    def completed() -> None:
        job.released = True
        job.cycles = cycles
        for group in run.groups:
            group._settle_offloaded()
        noted[:] = [True]

    with run.guarded(completed):
        run.await_earlier("enter")
        offers = suspension.proposals(live)
        heard = run.agree("enter", run.plan(), offers, suspension.questions())
        suspension.conclude(live, heard)
        if first or live:  # groups made while offloaded are released by a second offload
            run.call_back(registry.callbacks.offload)
            live = [group for group in live if group.is_live]  # a callback may destroy its own
        with run.timed("device"):
            run.round.run(
                "quiesced",
                lambda _: devices.synchronize(),
                lambda: "synchronizing the accelerator",
            )
        run.gate("quiesced")
        # From here on groups are touched: the operation completes or leaves them all failed.
        job.released = True
        recreated = [group for group in live if group.history.strategy == "recreate"]
        if run.options.strategy.may_suspend:
            kept = [group for group in live if group.history.strategy != "recreate"]
            suspension.attempt("suspended", kept, lambda strategy: strategy.release)
        run.note(run.each("released", recreated, RECREATE.release))
        if collect:
            with run.timed("collect"):
                gc.collect()
        run.measure("released")
        run.gate("released")
        suspension.judge()
    return run.report("" if live else "no live reloadable group")


def _reload(run: Operation, connect: Connect) -> Report:
    job, suspension = run.job, Suspension(run)
    was_released, generation = job.released, job.generation + job.released

    def completed() -> None:
        job.released = False
        job.generation = generation

    with run.guarded(completed):
        run.await_earlier("enter")
        if was_released:
            run.call_back(registry.callbacks.before_reload)
            # A callback may destroy its own: nobody is to make such a group again.
            run.groups = [g for g in run.groups if g.state is not GroupState.DESTROYED]
        here = [_standing(g) for g in run.groups if g.construction.order in job.shared]
        asks = [repr(order) for order in job.shared]
        standing = run.agree("enter", run.plan(connect=connect), here, asks)
        if not was_released:
            # So it is on all ranks: they agreed on the state.
            return run.report("nothing is offloaded")
        for order in [order for order in job.shared if repr(order) not in standing]:
            del job.shared[order]
        with run.timed("device"):
            devices.empty_cache()
        parked = [g for g in run.groups if not g.is_live and g.communicator is not None]
        replayed = {"without"}
        if run.options.strategy.may_suspend:
            run.round.run(
                "room", lambda _: suspension.check_room(parked), lambda: "looking for room"
            )
            run.gate("room")
            if not suspension.attempt("resumed", parked, lambda strategy: strategy.resume):
                replayed.add("kept")  # all ranks fell back: these groups are rebuilt, too
        shared = {o: made for o, made in job.shared.items() if standing[repr(o)] in replayed}
        items = _to_rebuild(run, shared)

        def rebuild(item: ReloadableProcessGroup | Construction, attempt: Attempt) -> None:
            # The round's label makes the name new in each attempt and in each job on one store: no
            # key of an attempt that failed, or of a job that ended, is ever read by the next one.
            suffix = f"@{generation}.{run.round.label}"
            if isinstance(item, ReloadableProcessGroup):
                RECREATE.rebuild(item, item.group_name + suffix, generation, attempt)
                return
            made = item.replay(item.name + suffix)
            if made is not None:  # destroyed here, alive on other ranks of the same call
                discard(made)

        with run.timed("store"):
            run.prepare_store("rebuilt", items)
        run.note(run.each("rebuilt", items, rebuild))
        run.measure("rebuilt")
        run.gate("rebuilt")
        if connect != "none":
            with run.timed("connect"):
                back = [group for group in run.groups if group in parked or group in items]
                run.each("done", back, lambda group, _: connect_group(group, connect))
        run.call_back(registry.callbacks.reload)
        run.gate("done")
    return run.report("" if run.done else "no reloadable group here")


def _standing(group: ReloadableProcessGroup) -> Offer:
    """For ranks that are no members: whether the group has to be made again."""
    kept = "without" if group.communicator is None else "live" if group.is_live else "kept"
    return Offer(repr(group.construction.order), kept)


def _to_rebuild(
    run: Operation, shared: Mapping[Any, Construction]
) -> list[ReloadableProcessGroup | Construction]:
    """What this rank takes part in, in the order that all ranks share."""
    here: dict[Any, ReloadableProcessGroup | Construction] = dict(shared)
    for group in run.groups:
        here.pop(group.construction.order, None)
        if group.state in (GroupState.OFFLOADED, GroupState.FAILED):
            here[group.construction.order] = group
    return [item for _, item in sorted(here.items(), key=lambda pair: pair[0])]


def _callable(callback: Callback, where: str) -> Callback:
    if not callable(callback):
        raise InvalidOptionError(
            f"{where}({callback!r}): it cannot be called; nothing was registered. Pass a function."
        )
    return callback


def _register(
    callbacks: list[tuple[str, Callable[[], object]]], callback: Callable[[], object], name: str
) -> Callable[[], None]:
    entry = (name or getattr(callback, "__qualname__", repr(callback)), callback)
    callbacks.append(entry)

    def remove() -> None:
        callbacks[:] = [other for other in callbacks if other is not entry]

    return remove
