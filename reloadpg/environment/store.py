"""The store of the job: its first connection, the place of each rank there, and the barrier.

A barrier of :mod:`reloadpg.rendezvous` assumes that all ranks have the same world size and
different ranks. At bring-up neither is certain: with WORLD_SIZE 2 on one rank and 3 on the other,
torch succeeds on one rank and times out much later on the other. So each process first takes its
place, by a compare-and-set.

Do not assume that a barrier waits for work on devices: it synchronizes processes only.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from ..c10d import stores, tables
from ..errors import InvalidOptionError, PeerFailedError, ReloadpgError, RendezvousTimeoutError
from ..lifecycle.job import Job, jobs
from ..rendezvous.decision import Decision
from ..rendezvous.protocol import GaveUp
from ..rendezvous.rendezvous import Rendezvous
from ..rendezvous.round import Round
from ..rendezvous.store_client import StoreClient
from ..settings import as_timedelta
from ..texts import named_ranks
from ..threads import Deadline, Interrupt, Task
from .identity import DistributedEnvironment
from .launchers import identify
from .scopes import open_scopes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BARRIER_TIMEOUT = timedelta(seconds=60)

_LOOK_S = 1.0
"""Seconds between two looks at the blocks around a barrier, and for each of them."""

_opened: dict[tuple[int, str, int], tuple[TCPStore, Iterator[int]]] = {}
"""The open stores by process, host and port, each with the numbers of its uses. Kept until the
process ends: otherwise, in a second bring-up at the same address, a fast rank may connect to the
first server while rank 0 is closing it."""

_PROBE_S = 0.1
"""Seconds between two attempts to connect to a store that does not exist yet."""


def open_store(environment: DistributedEnvironment, timeout: timedelta, operation: str) -> Store:
    """Return a store that all ranks of the job share, without keys of an earlier bring-up.

    Blocks until rank 0's server (or the launcher's) responds, or until ``timeout``; does not wait
    for the other ranks. A world of 1 opens no socket.
    """
    if environment.world_size == 1:
        return HashStore()
    address, port = environment.master_addr, environment.master_port or 0
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = environment.rank == 0 and not by_agent
    key, seconds, cause = (os.getpid(), address, port), timeout.total_seconds(), None
    if key not in _opened:
        task = _connect(address, port, seconds, serves=serves)
        try:
            # Torch retries indefinitely if a server accepts the connection but does not respond.
            if task.wait(seconds):
                _opened[key] = (task.result(), itertools.count(1))
        except RuntimeError as error:
            cause = error
    if key not in _opened:
        what = _what_failed(address, port, f"within {seconds:g} s", cause, by_agent, serves)
        raise RendezvousTimeoutError(
            f"{operation}: rank {environment.rank} of {environment.world_size}: {what}",
            phase="connect",
            seconds=seconds,
            missing=() if serves or by_agent else (0,),
        ) from cause
    store, uses = _opened[key]
    store.set_timeout(timeout)
    # torchrun's agent keeps its store when it restarts the ranks. Without the attempt in the
    # prefix, restarted ranks would read the decision of the earlier ones.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"reloadpg/bringup/{attempt}/{next(uses)}", store)


def _connect(address: str, port: int, seconds: float, *, serves: bool) -> Task[TCPStore]:
    """Open a store in the background. Local, non-blocking."""
    end = time.monotonic() + seconds

    def connect() -> TCPStore:
        if not serves:
            _await_server(address, port, end)
        return TCPStore(
            host_name=address,
            port=port,
            is_master=serves,
            timeout=timedelta(seconds=max(0.001, end - time.monotonic())),
            wait_for_workers=False,
            multi_tenant=True,
        )

    return Task(connect, "store-open")


def _await_server(address: str, port: int, end: float) -> None:
    """Wait until a server listens, or raise. Blocking, until the monotonic time ``end``.

    Torch retries in C++ for up to twice its timeout. If the interpreter exits during that, the
    process ends with "terminate called without an active exception", and the error is lost.
    """
    while True:
        left = max(0.001, end - time.monotonic())
        try:
            return socket.create_connection((address, port), timeout=left).close()
        except OSError as error:
            if time.monotonic() + _PROBE_S >= end:
                raise RuntimeError(f"no server listens at {address}:{port}: {error}") from error
        time.sleep(_PROBE_S)


def _what_failed(
    address: str, port: int, within: str, cause: Exception | None, by_agent: bool, serves: bool
) -> str:
    if "EADDRINUSE" in str(cause):
        return (
            f"the store could not be opened at {address}:{port}: the port is in use. Nothing was "
            f"started. Free the port, or set another MASTER_PORT on all ranks."
        )
    reason = f" ({cause})" if cause else ""
    if serves:
        return (
            f"rank 0 cannot reach its own store at {address}:{port} {within}{reason}. Nothing was "
            f"started. Set MASTER_ADDR to an address of this host, and MASTER_PORT to a port that "
            f"can be opened here."
        )
    who = "the launcher's agent" if by_agent else "rank 0"
    return (
        f"no store responded at {address}:{port} {within}{reason}: {who} has not started it, or "
        f"the address is unreachable from here. Nothing was started. See the output of that "
        f"process; raise init_timeout if it is only slow."
    )


def claim_place(
    client: StoreClient, environment: DistributedEnvironment, operation: str, seconds: float
) -> str:
    """Take this process's place in the job. Local, blocking, with a timeout.

    A rank can be counted at a barrier only if its rank is unique and all world sizes are equal.

    Returns:
        The difference to the place that another process has taken before; empty without one.
    """
    rank, size = environment.rank, environment.world_size
    here = f"{socket.gethostname()} (local rank {environment.local_rank})"
    process = uuid4().hex  # a request that is repeated finds its own place

    def take(store: Store) -> str:
        first = store.compare_set("place/first", "", f"{size} {rank}").decode()
        other_size, other = map(int, first.split())
        if other_size != size:
            sizes = sorted([(rank, size), (other, other_size)])
            return "world_size is " + "; ".join(f"{size} on rank {rank}" for rank, size in sizes)
        taken = store.compare_set(f"place/rank/{rank}", "", f"{process} {here}").decode()
        owner, _, there = taken.partition(" ")
        if owner != process:
            return (
                f"rank {rank} was taken by 2 processes: on {there}, {here}: start each rank once, "
                f"and set a separate MASTER_PORT for each job"
            )
        return ""

    return client.ask(take, Deadline(operation, seconds, "agree"), repeats=True)


# -- the barrier ------------------------------------------------------------------------------


_known: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[int, str], tuple[int, Rendezvous]]]
_known = weakref.WeakKeyDictionary()
"""The rendezvous of each group by process and purpose: a forked child would share the parent's
connection and count. Each has the recovery since which it exists: after a recovery the ranks may
have been at different barriers, and new processes at none."""


def rendezvous_of(group: ProcessGroup | None, purpose: str) -> Rendezvous:
    """The rendezvous of a group, or of the job, for one purpose; created on first use. Local."""
    world = tables.world()
    chosen = world if group is None else group
    if chosen is None or world is None:
        raise _no_group(purpose)
    job = jobs.known
    recovered = 0 if job is None else job.rendezvous.recovered
    known, key = _known.setdefault(chosen, {}), (os.getpid(), purpose)
    if key not in known or known[key][0] != recovered:
        known[key] = recovered, _new_rendezvous(world, chosen, purpose, recovered)
    return known[key][1]


def _new_rendezvous(
    world: ProcessGroup, group: ProcessGroup, purpose: str, recovered: int
) -> Rendezvous:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1 or not tables.has_peers():
        return Rendezvous(None, rank, size)
    prefix = f"reloadpg/{purpose}/{tables.name_of(group)}"
    if recovered:
        prefix += f"/after {recovered}"
    job = _job()
    client = None if job is None else job.rendezvous.client  # one thread sends all requests
    root = stores.root_store_of_job(world)
    return Rendezvous(root, rank, size, client=client, prefix=prefix)


def _job() -> Job | None:
    """The job of the default group; None in a forked child, or if the library is off. Local."""
    with suppress(ReloadpgError):
        return jobs.current("barrier")
    return None


def barrier(
    reason: str = "",
    *,
    timeout: timedelta | float = BARRIER_TIMEOUT,
    group: ProcessGroup | None = None,
) -> None:
    """Wait until all ranks of a group arrive, or raise an error that names the missing ranks.

    Collective over the group, whose ranks must call it in the same order; blocking, with a timeout;
    handles signals. The ranks meet on the rendezvous store, so the barrier also works while groups
    are offloaded, and it never starts an accelerator's first collective, whose timeout NCCL ignores
    (pytorch#124950). It does not wait for work queued on devices. A rank that arrives too late
    raises the same error. A process without launcher and group returns immediately.

    It ends early, within some seconds, if another rank has left a block around it by an exception
    (``process_group_scope``, ``init_distributed``), or if a process of this host has ended: one
    that has called a function of this library since the default group was created.

    Args:
        reason: the purpose of the barrier, for the error.
        timeout: how long to wait; a timedelta, or seconds; 60 s by default.
        group: the group; the default group if None. Ranks outside it return immediately.

    Raises:
        RendezvousTimeoutError: not all ranks arrived. Names reason, seconds and the missing ranks;
            also a TimeoutError.
        PeerFailedError: another rank has left the block, or its process has ended.
        ReloadpgError: several ranks, but no group yet.
        InvalidOptionError: an argument is invalid. Also a ValueError.
    """
    if not isinstance(reason, str):
        raise InvalidOptionError(
            f"barrier(reason={reason!r}) is not a text. Nothing was done. Call for example "
            f'barrier("after eval", timeout=60, group=group).'
        )
    seconds = as_timedelta(timeout, "timeout").total_seconds()
    if tables.is_non_member(group) and group is not None:
        return
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InvalidOptionError(
            f"barrier(group={group!r}) is not a process group. Nothing was done. Pass a group that "
            f"new_group() returned, or None for the default group."
        )
    what = f"barrier {reason!r}" if reason else "barrier"
    chosen = tables.world() if group is None else group
    if chosen is None:
        if identify(os.environ).world_size != 1:
            raise _no_group(f"barrier({reason!r})")
        return
    _meet(chosen, "barrier", what, seconds)


def leave_together(
    timeout: timedelta, group: ProcessGroup | None = None, purpose: str = "exit"
) -> None:
    """Reach a last barrier with all ranks of a group, or of the job.

    Collective, blocking, with a timeout. For the job, rank 0, which hosts the store, leaves last:
    otherwise the store could end with its process before other ranks have read the decision.
    """
    rendezvous, seconds = rendezvous_of(group, purpose), timeout.total_seconds()
    round_ = _meet(group, purpose, purpose, seconds)
    if rendezvous.alone or group not in (None, tables.world()):
        return
    count, all_left = f"left/{round_.label}", f"all left/{round_.label}"

    def leave(store: Store) -> None:
        if rendezvous.rank == 0:
            store.wait([all_left], timeout)
        elif store.add(count, 1) == rendezvous.size - 1:
            store.set(all_left, "1")

    try:
        rendezvous.ask(leave, Deadline(purpose, seconds))
    except (ReloadpgError, RuntimeError, TimeoutError) as error:
        # All ranks had arrived; a later death of one does not matter here.
        logging.getLogger(__name__).warning(
            "%s: not all ranks confirmed their exit: %s", purpose, error
        )


def _no_group(what: str) -> ReloadpgError:
    return ReloadpgError(
        f"{what}: the launcher started several ranks, but this process has no default group. "
        f"Nothing was done. Call reloadpg.environment.ensure_process_group() or "
        f"init_distributed() first."
    )


def _meet(group: ProcessGroup | None, purpose: str, what: str, seconds: float) -> Round:
    """Reach a barrier on the store. Collective over the group; blocking, with a timeout."""
    rendezvous, watch = rendezvous_of(group, purpose), _Watch(group, what)
    try:
        with Round(rendezvous, what, ("arrive",), seconds, watch) as round_:
            round_.enter()
            round_.barrier("arrive")
    except _PeerLeft as left:
        raise left.error from None
    except (RendezvousTimeoutError, PeerFailedError) as error:
        # A rank that knows more may have ended this barrier before this rank has looked.
        raise watch.left_a_block() or _in_job_ranks(error, watch.members, what) from None
    return round_


class _PeerLeft(BaseException):
    """Another rank has left a block around a barrier.

    Not an Exception: this rank does not wait for an answer of that rank.
    """

    def __init__(self, error: PeerFailedError) -> None:
        super().__init__(str(error))
        self.error = error


class _Watch(Interrupt):
    """Interrupts a wait at a barrier for other ranks that cannot come.

    Args:
        group: the group of the barrier.
        what: the barrier, for messages.

    Attributes:
        members: its ranks in the job.
    """

    def __init__(self, group: ProcessGroup | None, what: str) -> None:
        super().__init__()
        self._what = what
        self.members = tuple(map(int, dist.get_process_group_ranks(group)))
        # In large jobs less often: all ranks ask one server.
        self._pause_s = max(_LOOK_S, dist.get_world_size() / 1000)
        self._next = time.monotonic() + self._pause_s
        self._job = _job() if tables.has_peers() else None
        if self._job is not None:
            self._job.rendezvous.count_job()  # from now on other ranks watch this process

    def check(self) -> None:
        """Raise if a rank cannot come. Local; sends requests once per second at most."""
        super().check()
        if time.monotonic() < self._next:
            return
        if error := self.left_a_block():
            raise _PeerLeft(error)
        if self._job is not None:
            self._look_at_processes(self._job.rendezvous)
        self._next = time.monotonic() + self._pause_s

    def _look_at_processes(self, job: Rendezvous) -> None:
        if not job.state.confirmed:
            with suppress(ReloadpgError):
                job.watch(Deadline(self._what, _LOOK_S))
        for rank in job.peers.dead():
            if rank in self.members:
                text = f"its process on the host of rank {job.rank} has ended"
                dead = self.members.index(rank)
                raise GaveUp(Decision("failed", dead, text, dead=(dead,)))

    def left_a_block(self) -> PeerFailedError | None:
        """The error for a rank that has left a block around the barrier; None without one."""
        for group in [group for scope in open_scopes for group in scope.meets_on()]:
            exit_ = rendezvous_of(group, "exit")
            if exit_.alone:
                continue
            with suppress(ReloadpgError):
                exit_.count_job(_LOOK_S)
                now = exit_.drive(exit_.state.read(), Deadline(self._what, _LOOK_S))
                if now.last.operation == "exit" and now.number > exit_.state.next:
                    return self._error(now.last, group)
        return None

    def _error(self, decision: Decision, group: ProcessGroup) -> PeerFailedError:
        rank = dist.get_process_group_ranks(group)[decision.rank]
        return PeerFailedError(
            f"{self._what}: rank {rank} has left the block around it: "
            f"{decision.text or 'it had waited for the others at the end of the block'}. Its "
            f"groups of the block are aborted. Let this error end the block here, too.",
            rank=rank,
            phase="arrive",
        )


def _in_job_ranks(
    error: RendezvousTimeoutError | PeerFailedError, members: Sequence[int], what: str
) -> ReloadpgError:
    """The error of a barrier of a group, with ranks of the job."""
    missing = [members[rank] for rank in error.missing]
    if isinstance(error, PeerFailedError):
        text = str(error)
        if [*members] != [*range(len(members))]:
            text += f"\nThese are ranks of the group, which has {named_ranks(members)} of the job."
        return PeerFailedError(text, rank=members[error.rank], phase=error.phase, missing=missing)
    if not missing:  # the store itself did not respond
        return error
    late = " This rank arrived too late." if dist.get_rank() in missing else ""
    return RendezvousTimeoutError(
        f"{what}: {error.arrived} of {len(members)} ranks arrived within {error.seconds:g} s; "
        f"missing: {named_ranks(missing)}.{late} No collective was started. Find out "
        f"why they are delayed (py-spy dump on their nodes), then end the job or try again.",
        phase=what,
        seconds=error.seconds,
        arrived=error.arrived,
        missing=missing,
    )
