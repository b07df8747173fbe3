"""Ray actors as the ranks of one job, with offload and reload from the driver.

::

    trainers = [Trainer.remote() for _ in range(8)]  # any actor class
    setup_actors(trainers)  # rank, size and address of the job, as torchrun would set them
    ray.get([t.train.remote() for t in trainers])  # install, init_process_group("nccl"), ...
    offload_all(trainers)
    generate()
    reload_all(trainers)

The index of an actor in the list is its rank: pass the same list to each function. Each function
first checks that the actors respond: a dead or busy actor is named before any group is changed. Do
not assume that the actors abandon a call if the driver has: Ray runs submitted calls, and later
calls queue behind them. Ray is imported when one of these functions is called.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..environment.identity import AGENT_STORE, DistributedEnvironment, host_store
from ..errors import InvalidOptionError, PeerFailedError, ReloadpgError, RendezvousTimeoutError
from ..settings import as_timedelta
from ..texts import format_ranks
from . import framework

if TYPE_CHECKING:
    from ..extend import Connect
    from ..reports import Report

__all__ = [
    "ActorFailedError",
    "ActorTimeoutError",
    "offload_all",
    "reload_all",
    "setup_actors",
]

GRACE_S = 5.0
"""Seconds after the first failure for the other actors to end by themselves."""

_served: list[Any] = []
"""In the process of rank 0: the store of its job, which lives as long as this process."""


class ActorFailedError(ReloadpgError):
    """An actor failed in a step of all actors; its own error is chained.

    Attributes:
        rank: the actor that failed first, or the first of these in the list.
        errors: each actor's error, by rank.
        waiting: the actors that have not responded.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        errors: Mapping[int, BaseException] | None = None,
        waiting: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.rank, self.errors, self.waiting = rank, dict(errors or {}), tuple(waiting)


class ActorTimeoutError(ActorFailedError, TimeoutError):
    """Not all actors responded within the timeout, and none failed."""


def setup_actors(
    actors: Sequence[Any],
    *,
    timeout: timedelta | float = 60.0,
) -> None:
    """Make the actors the ranks of one job, with the environment variables that torchrun sets.

    Blocking; call it in the driver, before the actors create groups. The job's store is opened
    immediately in the process of rank 0, on a port that the system picks, so no other program can
    take the port.

    Args:
        actors: one handle per rank, in rank order; actors of any class, on any nodes.
        timeout: timeout of the whole call, a timedelta or seconds; includes the scheduling of the
            actors.

    Raises:
        ActorFailedError: an actor is dead, failed, or is already in a job.
        ActorTimeoutError: not all actors responded in time; it names them.
        InvalidOptionError: there are no actors, one is listed twice, or another argument is
            invalid; nothing was sent to any actor.
    """
    call = _Call("setup_actors", actors, timeout)
    places: list[tuple[str, str]] = call.on_all(_place, UNTOUCHED)
    address = places[0][1]
    [port] = call.on_all(_serve, UNTOUCHED, {0: address})
    variables = job_variables([node for node, _ in places], address, port)
    call.on_all(_set_variables, NO_JOB, dict(enumerate(variables)))


def offload_all(actors: Sequence[Any], *, timeout: timedelta | float = 600.0) -> list[Report]:
    """Call ``reloadpg.offload`` in all actors of a job, and wait for all.

    Blocking; called in the driver; idempotent. When it returns, the memory is free on all ranks.

    Args:
        actors: all ranks of the job, in rank order.
        timeout: a timedelta or seconds. It should be longer than the ``timeout`` of ``install``, so
            that reloadpg in the actors times out first and names the missing ranks.

    Returns:
        The reports, in rank order.

    Raises:
        ActorFailedError: an actor is dead or its ``offload`` raised; it names the actor.
        ActorTimeoutError: not all actors responded in time; it names them.
        InvalidOptionError: there are no actors, one is listed twice, or another argument is
            wrong; nothing was sent to any actor.
    """
    call = _Call("offload_all", actors, timeout)
    call.on_all(_answer, UNTOUCHED)
    return call.on_all(_offload, TOUCHED)


def reload_all(
    actors: Sequence[Any],
    *,
    timeout: timedelta | float = 600.0,
    connect: Connect | None = None,
) -> list[Report]:
    """Call ``reloadpg.reload`` in all actors of a job; ``connect`` is its argument.

    As :func:`offload_all`; may be called again after a failure.
    """
    from ..extend import validate

    call = _Call("reload_all", actors, timeout)
    validate(connect)
    call.on_all(_answer, UNTOUCHED)
    return call.on_all(_reload, TOUCHED, dict.fromkeys(call.actors, connect))


def job_variables(nodes: Sequence[str], address: str, port: int) -> list[dict[str, str]]:
    """The variables of each rank, as torchrun sets them, from the name of each rank's node."""
    order = list(dict.fromkeys(nodes))
    environments = (
        DistributedEnvironment(
            source="ray",
            rank=rank,
            local_rank=list(nodes[:rank]).count(node),
            world_size=len(nodes),
            local_world_size=list(nodes).count(node),
            node_rank=order.index(node),
            num_nodes=len(order),
            master_addr=address,
            master_port=port,
        )
        for rank, node in enumerate(nodes)
    )
    return [{**one.variables(), **AGENT_STORE} for one in environments]


# -- in the actors; the first argument is the actor object --------------------------------------


def _place(_: object) -> tuple[str, str]:
    """Node and address of this actor, which must not be in a job."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        raise ReloadpgError(
            "setup_actors: torch.distributed is already initialized in this actor; nothing was "
            "changed. Call torch.distributed.destroy_process_group() in all actors first."
        )
    ray = _ray()
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


def _answer(_: object) -> None:
    """Do nothing; the return shows that this actor responds."""


def _serve(_: object, address: str) -> int:
    """Open the job's store, which lives as long as this process; return the port."""
    _served[:] = [host_store(address)]
    return int(_served[0].port)


def _set_variables(_: object, variables: Mapping[str, str]) -> None:
    os.environ.update(variables)


def _offload(_: object) -> Report:
    from .. import offload

    return offload()


def _reload(_: object, connect: Connect | None) -> Report:
    from .. import reload

    return reload(connect=connect)


# -- in the driver ------------------------------------------------------------------------------

UNTOUCHED = "Nothing was changed in any actor: call {what}() again once all of them respond"
TOUCHED = "Groups that were changed have no communicator: call reload_all() once all actors respond"
NO_JOB = "The actors are not a job yet: call {what}() again once all of them respond"
RESTART = "An actor that died cannot rejoin its job. Restart all actors."


def _ray() -> Any:
    return framework("Ray", "'ray>=2.60'", "ray")


def _what_is_wrong(actors: object) -> str:
    """Return why this is not a list of a job's actors; empty if it is."""
    if not isinstance(actors, Sequence):
        return f"actors is not a list but {actors!r}"
    for actor in actors:  # a remote class has plain functions instead of actor methods
        if not hasattr(getattr(actor, "__ray_call__", None), "remote"):
            return f"{actor!r} is not an actor"
    if not actors:
        return "there are no actors"
    return "an actor is listed twice" if len(set(actors)) != len(actors) else ""


class _Call:
    """One call of a public function, with one timeout for its steps in all actors.

    Attributes:
        actors: the actors by rank.
    """

    def __init__(self, what: str, actors: Sequence[Any], timeout: timedelta | float) -> None:
        self._ray = _ray()
        self._what = what
        wrong = _what_is_wrong(actors)
        if wrong:
            raise InvalidOptionError(
                f"{what}(actors): {wrong}; nothing was done. Pass one handle per rank, in order."
            )
        self.actors = dict(enumerate(actors))
        self._timeout = as_timedelta(timeout, "timeout").total_seconds()
        self._deadline = time.monotonic() + self._timeout

    def on_all(
        self, task: Callable[..., Any], state: str, arguments: Mapping[int, Any] | None = None
    ) -> list[Any]:
        """Run a function in all actors and wait for all of them, or briefly after a failure.

        ``task`` is a module-level function, called with the actor object and its argument, in the
        actors that have one; in all, and without one, if ``arguments`` is None. ``state`` is the
        state after a failure and the remedy, for messages.
        """
        ray, given = self._ray, {} if arguments is None else arguments
        rank_of = {
            self.actors[rank].__ray_call__.remote(task, *([given[rank]] if given else [])): rank
            for rank in given or self.actors
        }
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        deadline = self._deadline
        waiting = list(rank_of)
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            rank = rank_of[ready[0]]
            try:
                results[rank] = ray.get(ready[0])
            except (ray.exceptions.RayError, ReloadpgError) as error:
                errors[rank] = error
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(results) == len(rank_of):
            return [results[rank] for rank in rank_of.values()]
        silent = tuple(rank_of[ref] for ref in waiting)
        state = state.format(what=self._what)
        if errors:
            raise self._failed(errors, silent, state)
        names = ", ".join(map(self._named, silent))
        raise ActorTimeoutError(
            f"{self._what}: {len(silent)} of {len(self.actors)} actors did not respond within "
            f"{self._timeout:g} s: {names}. {state}.",
            silent[0],
            waiting=silent,
        )

    def _failed(
        self, errors: Mapping[int, BaseException], silent: Sequence[int], state: str
    ) -> ActorFailedError:
        """Build the error of the actor that failed first, the cause of later failures."""
        known = self._ray.exceptions
        secondary = (PeerFailedError, RendezvousTimeoutError)
        own = [rank for rank, error in errors.items() if not isinstance(error, secondary)]
        rank = min(own or errors)
        cause: BaseException = getattr(errors[rank], "cause", None) or errors[rank]
        # Ray's messages are a page long; the chained error has the full text.
        text = str(cause).partition("\n")[0] if isinstance(cause, known.RayError) else str(cause)
        text = " ".join(f"{type(cause).__name__}: {text}".split()).rstrip(".")
        others = sorted(set(errors) - {rank})
        told = f" Also failed: {format_ranks(others)}." if others else ""
        told += f" No response yet: {format_ranks(silent)}." if silent else ""
        state += f". {RESTART}" if isinstance(cause, known.RayActorError) else "."
        error = ActorFailedError(
            f"{self._what}: actor {self._named(rank)} failed: {text}.{told} {state}",
            *(rank, errors, silent),
        )
        error.__cause__ = errors[rank]  # Ray's error, with the actor's traceback
        return error

    def _named(self, rank: int) -> str:
        return f"{rank} {self.actors[rank]!r}"
