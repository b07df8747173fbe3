"""This rank's connection to the rendezvous of a job, and its state of :mod:`.protocol`.

A :class:`Session` drives the protocol: it executes the commands of a step on the store and returns
the replies to it, from any thread of the rank, one step at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from torch.distributed import PrefixStore, ProcessGroup, Store

from .. import c10d
from ..errors import ReloadpgError
from ..settings import GRACE
from ..texts import named_ranks
from .decision import Decision, store_lost, store_silent
from .peers import Peers
from .protocol import (
    Arrive,
    Close,
    Command,
    Decide,
    Event,
    Fail,
    Join,
    Lost,
    Reply,
    State,
    base,
    step,
)
from .store_client import (
    PeerDied,
    Root,
    StoreClient,
    StoreLost,
    StoreSilent,
    absent,
    execute,
    read,
)
from .worker_thread import Task, Wait, wait_seconds

T = TypeVar("T")
_S = TypeVar("_S", bound="Session")

NOTIFY_S = 5.0
"""Shortest time, in seconds, that a failing rank has to notify the others."""

_COUNT_S = 5.0
"""Timeout for counting a new job on the store, in seconds."""

_FLAG_S = 0.5
"""Timeout for reading whether a recovery was requested, in seconds."""

_SILENT_S = 2.0, 60.0
"""Back-off for an unresponsive store: initial and maximum, in seconds."""

_NAMED = 16
"""Maximum number of missing ranks that the log of a long wait names."""

_LOOKING = 8
"""Ranks below this one, and powers of two, look for missing ranks during a long wait."""


barrier_hooks: list[Callable[[str, str, str, int], object]] = []
"""For ``reloadpg.testing``: called at each barrier with a moment, the operation, the phase and this
rank. What a hook raises is raised there. The moments are ``before`` this rank arrives; ``waiting``,
counted there and about to wait, in the thread that asks the store; ``after`` it has read the
decision; and ``failing``, before it notifies the others of a failure."""


class Session:
    """The connection of one rank of a job, or of a group, to their store.

    Args:
        root: returns the store; None for a rank without peers.
        rank: this rank.
        size: number of ranks.
        watches: whether to watch the processes on this host.
        counts: whether this process will count the job; one that is refused while it starts takes
            it for the first one on its store.

    Attributes:
        alone: whether this rank has no peers.
        recovered: number of the last completed recovery; 0 before the first.
        peers: the ranks of this host.
        state: this rank's state of the protocol. Its ``instance`` is the number of this job on its
            store, equal on all ranks and 0 before the job is counted.
    """

    def __init__(
        self,
        root: Root | None,
        rank: int,
        size: int,
        *,
        watches: bool = False,
        counts: bool = True,
    ) -> None:
        self.rank = rank
        self.size = size
        self.alone = root is None
        self.recovered = 0
        self._root = root
        self._client = StoreClient(root, self._join)
        self._stepping = threading.Lock()  # held for one protocol step, never during I/O
        self._joining: threading.Event | None = None
        self.peers = Peers(rank, watches=watches and root is not None)
        members = tuple(range(size)) if root is not None else (rank,)
        instance = 0 if counts else 1
        self.state = State(rank, members, host=self.peers.host, instance=instance)
        self._last = 0
        self._ask_again = 0.0
        self._silent_s = 0.0
        # Limits the requests of all ranks of a large job to some thousand per second.
        self.pause_s = max(0.1, size / 2000)

    @property
    def grace_s(self) -> float:
        """Seconds within which ranks must respond after a failure."""
        return wait_seconds(GRACE) + 2 * self.pause_s

    @classmethod
    def of_world(cls: type[_S], world: ProcessGroup) -> _S:
        """Return that of the job with the default group ``world``. Local."""
        root = c10d.root_store_of_job(world) if c10d.has_peers() else None
        rank, size = world.rank(), world.size()
        return cls(root, rank, size, watches=True)

    # -- the job ----------------------------------------------------------------------------

    def count_job(self, root: Store, seconds: float = _COUNT_S) -> None:
        """Count this job on its store. Blocking, for at most ``seconds``; idempotent.

        All ranks call this when the job begins: the first operation may be called by some ranks
        only, and later another job may use the store's port. If it fails, the first operation
        raises.
        """
        if not Task(partial(self._join, root), "count").wait(seconds):
            self._give_up_joining()

    def connect_ahead(self) -> list[Task[Store]]:
        """Connect to the store in the background, and count this job if needed. Local.

        Also starts the thread with which this rank notifies the others if it can start no other.
        """
        self._client.reserve()
        return [] if self.alone else [self._client.connect()]

    def end(self) -> None:
        """End this rank's part in the job. Local."""
        self.peers.forget()

    def _join(self, root: Store) -> None:
        """Count this job, unless that is done, by one thread at a time. Blocking."""
        while True:
            mine = threading.Event()
            with self._stepping:
                if self.state.instance:
                    return
                joining = self._joining = self._joining or mine
            if joining is not mine:
                joining.wait()  # in a thread that can be abandoned
                continue
            try:
                self._count(root, mine)
            finally:
                if self._joining is mine:
                    self._give_up_joining()

    def _count(self, root: Store, mine: threading.Event) -> None:
        # A separate state machine, since an operation may begin while this runs.
        state, wait = self.state._replace(command_number=0), Wait("join", _COUNT_S)
        state, command = step(state, Join())
        # A thread that was abandoned here would publish this process again.
        while command is not None and self._joining is mine:
            reply = execute(root, command, wait, self.pause_s, self.peers)
            state, command = step(state, Reply(state.command_number, reply))
        with self._stepping:
            if not self.state.instance and self._joining is mine:
                self.state = self.state._replace(instance=state.instance, published=state.published)

    def _give_up_joining(self) -> None:
        """Let another thread count this job: the one that does it has ended, or may hang."""
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.set()

    def is_host(self) -> bool:
        """Whether the store's server is in this process. Local."""
        if self._root is None:
            return False
        try:
            return c10d.is_store_host(self._root(), self.rank)
        except RuntimeError:
            return False  # the job has ended

    # -- operations -------------------------------------------------------------------------

    def cancel_recovery(self, error: BaseException) -> None:
        """Notify the ranks in a recovery that this one will not take part. Waits a limited time.

        Call it if this rank was interrupted before :meth:`recover` returned.
        """
        event = Fail(Decision("cancelled", self.rank, text_of(error)))
        with suppress(ReloadpgError):
            self.drive(event, Wait("recover", NOTIFY_S, "flag"))

    def complete_recovery(self) -> None:
        """Mark the current recovery as complete on all ranks. Local."""
        self.recovered = self.state.epoch

    def recovery_requested(self, every: float) -> bool:
        """Whether a recovery was requested that this rank has not joined. Local, with a timeout.

        Polls at most once per ``every`` seconds; otherwise returns the cached answer. False while
        the store does not respond, with a back-off of 2 s that doubles up to a minute.
        """
        if self.alone or time.monotonic() < self._ask_again:
            return self._last > self.state.epoch
        self._ask_again = time.monotonic() + every
        try:
            text = self.ask(lambda store: read(store, "recovery"), Wait("flag", _FLAG_S))
            self._last, self._silent_s = int(text or 0), 0.0
        except ReloadpgError:
            least, most = _SILENT_S
            self._silent_s = min(most, max(least, 2 * self._silent_s))
            self._ask_again = time.monotonic() + self._silent_s
        return self._last > self.state.epoch

    def gather(self, summary: Callable[[list[str]], str], seconds: float) -> None:
        """Read all ranks' reports to this recovery and write a summary. Blocking, with a timeout.

        One rank calls this, between two barriers of the recovery.
        """
        own = f"recovery/{self.state.epoch}"

        def question(store: Store) -> None:
            reports = [read(store, f"{own}/{rank}") or "{}" for rank in self.state.members]
            store.set(f"{own}/summary", summary(reports))

        with self._stepping:
            self.state = self.state.owning(f"{base(self.state.instance)}/{own}/summary")
        self.ask(question, Wait("recover", seconds, "agreed"))

    def summary(self, seconds: float) -> str:
        """Read the summary. Call it after the barrier that follows :meth:`gather`."""
        key, wait = f"recovery/{self.state.epoch}/summary", Wait("recover", seconds, "agreed")
        return self.ask(lambda store: store.get(key).decode(), wait)

    # -- the store --------------------------------------------------------------------------

    def ask(self, question: Callable[[Store], T], wait: Wait) -> T:
        """Send requests to this job's part of the store; see :meth:`ask_root`."""
        return self.ask_root(
            lambda root: question(PrefixStore(base(self.state.instance), root)), wait
        )

    def ask_root(self, question: Callable[[Store], T], wait: Wait) -> T:
        """Send requests to the whole store. Blocking, with a timeout; see :meth:`StoreClient.ask`.

        Raises:
            ReloadpgError: the store is lost.
            RendezvousTimeoutError: the store does not respond.
        """
        with self._errors(wait):
            return self._client.ask(question, wait)

    @contextmanager
    def _errors(self, wait: Wait) -> Iterator[None]:
        """Raise errors for the user in place of those of the store."""
        try:
            yield
        except StoreLost as error:
            raise store_lost(wait.operation, wait.phase, error) from error
        except StoreSilent:
            raise store_silent(
                wait.operation, wait.phase, seconds=wait.seconds, rank=self.rank, size=self.size
            ) from None
        finally:
            if not self.state.instance:  # the thread that counts this job may hang
                self._give_up_joining()

    def drive(self, event: Event, wait: Wait) -> State:
        """Pass an event to the protocol and perform its commands. Blocking, with a timeout.

        Raises:
            ReloadpgError: the store is lost.
            RendezvousTimeoutError: the store does not respond.
        """
        # While closing, all ranks respond now, so no wait is long.
        closes = isinstance(event, Close)
        pause_s = self.pause_s / 5 if closes else self.pause_s
        detail = None if closes else self._missing

        # Runs in a thread, which is abandoned if the store does not respond. What it still receives
        # changes nothing: each reply carries the number of its command, and the state has moved on.
        def execute_all(root: Store) -> None:
            number, command = self._step(event)
            hooks = barrier_hooks if isinstance(event, Arrive) else ()
            while command is not None:
                if hooks and self.state.is_waiting:  # once: a long wait polls
                    run_hooks("waiting", wait.operation, wait.phase, self.rank)
                    hooks = ()
                reply = execute(root, command, wait, pause_s, self.peers, detail)
                number, command = self._step(Reply(number, reply))

        # Only a barrier waits for other ranks without a limit below the timeout; `run` checks them
        # between its polls.
        died = self.peers.dead if isinstance(event, Arrive) else None
        try:
            with self._errors(wait):
                self._client.ask(execute_all, wait, died)
        except PeerDied:  # over a new connection: the abandoned request may hold the other one
            seconds = wait_seconds(GRACE)
            return self.drive(Decide(self.death()), Wait(wait.operation, seconds, wait.phase))
        except ReloadpgError:
            # It is unknown whether the last command took effect: this rank may have been counted.
            self._step(Lost())
            raise
        return self.state

    def death(self) -> Decision:
        """The decision to write after processes of other ranks have ended. Local."""
        dead = self.peers.dead()
        text = f"its process on the host of rank {self.rank} has ended"
        return Decision("failed", dead[0], text, by=self.rank, dead=dead)

    def _step(self, event: Event) -> tuple[int, Command | None]:
        with self._stepping:
            self.state, command = step(self.state, event)
            return self.state.command_number, command

    def _missing(self, root: Store) -> str:
        """Name the missing ranks, for the log of a long wait. Empty on most ranks of a large job.

        The answer costs the store's server as much as a barrier, so few ranks may ask for it.
        """
        state, rank = self.state, self.rank
        if not state.phases or (rank >= _LOOKING and rank & (rank - 1)):
            return ""
        late = absent(root, state.key("here"), state.members, _NAMED + 1)
        more = " and others" if len(late) > _NAMED else ""
        return f"missing: {named_ranks(late[:_NAMED])}{more}" if late else ""


def text_of(error: BaseException) -> str:
    """The type and message of an error, for the other ranks."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:4000]


def run_hooks(moment: str, operation: str, phase: str, rank: int) -> None:
    for hook in barrier_hooks:
        hook(moment, operation, phase, rank)
