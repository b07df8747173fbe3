"""Bring-up: validate, connect to the store, agree, and only then create groups.

A default group that already exists is adopted unchanged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, NoReturn

import torch
import torch.distributed as dist

from ..c10d import backends, devices, tables
from ..errors import ReloadpgError
from ..lifecycle.connect import Connect, sum_ranks, validate
from ..lifecycle.job import jobs
from ..observability.logs import name_rank_in_records
from ..rendezvous.decision import Decision
from ..rendezvous.plan import Entry, Plan
from ..rendezvous.rendezvous import Rendezvous
from ..rendezvous.round import Round
from ..settings import as_timedelta
from ..texts import named_ranks, warn
from ..threads import CancelToken, Deadline, Task
from .device import Placement, accelerator, choose_placement, parse_device
from .identity import DistributedEnvironment
from .launchers import identify, identity_in_group, is_initialized
from .mesh import build_mesh, checked_seed, resolve_mesh_dims, set_seed
from .network import (
    advisory_timeouts,
    interface_in_use,
    restore_interfaces,
    select_interfaces,
    wrong_gloo_interfaces,
)
from .scopes import open_scopes
from .store import claim_place, open_store, rendezvous_of
from .teardown import OwnGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh

INIT_TIMEOUT = timedelta(minutes=5)
EVALUATION_TIMEOUT = timedelta(seconds=60000)

_PHASES = ("agree", "connected")

_UNREACHABLE = (
    "Check that each address is reachable from the other hosts and not a loopback address, or set "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface that is."
)


@dataclass(eq=False)
class DistributedContext:
    """Result of bring-up. As a context manager it destroys the groups created since it began.

    The exit ends the groups that bring-up or the block has created, as ``process_group_scope``
    does: by a barrier with a timeout and an orderly destroy, or after an exception by an abort. A
    peer that waits in a collective of NCCL is not notified of the exception. Without ``with``, call
    ``destroy_distributed()``.

    Attributes:
        environment: the identity of this process.
        device: its device.
        mesh: the mesh, if ``mesh_dims`` was given.
        owned: whether this bring-up created the default group. Unaffected by offload and reload.
        own: the groups created since bring-up began.
    """

    environment: DistributedEnvironment
    device: torch.device
    mesh: DeviceMesh | None
    owned: bool
    own: OwnGroups = field(default_factory=OwnGroups, repr=False)

    @property
    def rank(self) -> int:
        """The rank of this process, as ``environment.rank``."""
        return self.environment.rank

    @property
    def world_size(self) -> int:
        """The number of ranks, as ``environment.world_size``."""
        return self.environment.world_size

    @property
    def local_rank(self) -> int | None:
        """The rank on this host, as ``environment.local_rank``; None if it is unknown."""
        return self.environment.local_rank

    def __enter__(self) -> DistributedContext:
        open_scopes.append(self.own)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> Literal[False]:
        return self.own.__exit__(kind, error, trace)


@dataclass(frozen=True)
class Request:
    """What a program asks of bring-up: the arguments of :func:`init_distributed`, checked.

    What depends on the launcher or an existing group is checked later.

    Attributes:
        operation: the function that the program has called, for messages.
    """

    operation: str
    backend: str | None
    timeout: timedelta | None
    init_timeout: timedelta
    device: torch.device | None
    bind: bool = False
    mesh_dims: Mapping[str, int] | None = None
    seed: int | None = None
    connect: Connect = "eager"

    def mesh_sizes(self, world_size: int) -> Mapping[str, int] | None:
        """The dimensions of the mesh in this world; None if no mesh is requested."""
        return None if self.mesh_dims is None else resolve_mesh_dims(self.mesh_dims, world_size)


def init_distributed(
    backend: str | None = None,
    *,
    timeout: timedelta | float | None = None,
    init_timeout: timedelta | float = INIT_TIMEOUT,
    device: torch.device | str | None = None,
    bind: bool = False,
    mesh_dims: Mapping[str, int] | None = None,
    seed: int | None = None,
    connect: Connect = "eager",
) -> DistributedContext:
    """Set up distributed training in this process: default group, device, mesh and seed.

    Collective over the job; blocking, with the timeout ``init_timeout``; handles signals while it
    waits. All arguments are validated before a socket is opened. Before the first collective, the
    ranks agree through the store on world size, ranks, backend and mesh, so a difference raises on
    all ranks.

    In a job of several hosts, bring-up sets ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` where
    they are unset, to an InfiniBand interface that is up and has an address. If
    ``NCCL_SOCKET_IFNAME`` names one interface, gloo uses the same one. On a host without
    InfiniBand, ``GLOO_SOCKET_IFNAME`` is set to the interface that routes to the rendezvous
    address: by default gloo uses the address of the host name, often a loopback address. The
    variables are unset when the groups are destroyed. No other variable is written. A warning says
    if ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` makes timeouts advisory.

    An existing default group is adopted unchanged: ``owned`` is False, and a warning lists the
    requested settings that differ. Without ``mesh_dims``, this is local. A group that contradicts
    the launcher is an error, such as a group of one rank in a job of two, or one in which this
    process has another rank. A library, a notebook or the parent of a forked process may have
    created it. A group that is larger than SLURM's or OpenMPI's number of tasks is no
    contradiction.

    In a world of 1, no group, store or port is created, unless ``backend`` or ``mesh_dims`` asks
    for a group. A program without a launcher then runs as without torch.distributed, and
    :func:`barrier` and the other functions here return at once.

    Args:
        backend: as for ``init_process_group``; None selects the device's backend (gloo, nccl, ...).
        timeout: timeout of WORLD and of every group of the mesh, before and after reloads; a
            timedelta, or seconds. None is torch's default for the backend.
        init_timeout: timeout of bring-up and of the barrier at the exit of the context.
        device: None selects the accelerator with the local rank's index, or the CPU. If only one
            device is visible, it is used.
        bind: bind the default group to the device, as ``device_id`` of ``init_process_group``
            (torch then connects immediately and splits). Without effect on the CPU.
        mesh_dims: sizes for ``resolve_mesh_dims``; None creates no mesh.
        seed: passed to ``set_seed`` with the mesh; None sets no seed. It may differ between ranks.
        connect: ``eager`` connects the new groups with a small all-reduce on each, within
            ``init_timeout``, so that an unreachable interface is an error now and not a hang in the
            first step. ``canary`` also checks the sums. ``none`` lets the first collective connect,
            for jobs that never use some of the groups.

    Raises:
        DistributedEnvironmentError: the launcher's variables are invalid, or contradict the default
            group; nothing was opened, written or created. A ValueError.
        InvalidOptionError: an argument is invalid; likewise. A ValueError.
        DisagreementError: the ranks differ; names ranks and values. Raised on all ranks.
        RendezvousTimeoutError: not all ranks arrived in time; names the missing ranks. A
            TimeoutError.
        PeerFailedError: another rank failed while creating the groups.
        ReloadpgError: this rank failed; names the group, its ranks and the interface.
    """
    validate(connect, "init_distributed")
    return bring_up(
        Request(
            operation="init_distributed",
            backend=backend,
            timeout=None if timeout is None else as_timedelta(timeout, "timeout"),
            init_timeout=as_timedelta(init_timeout, "init_timeout"),
            device=parse_device(device),
            bind=bind,
            mesh_dims=mesh_dims,
            seed=None if seed is None else checked_seed(seed),
            connect=connect,
        )
    )


def ensure_process_group(
    *,
    timeout: timedelta | float = EVALUATION_TIMEOUT,
    init_timeout: timedelta | float = INIT_TIMEOUT,
) -> bool:
    """Create a gloo group if the launcher started several ranks and there is no group.

    Collective over the job if it creates the group; blocking, with the timeout ``init_timeout``;
    idempotent. Does and logs nothing in a world of 1, or if a group exists.

    Args:
        timeout: timeout of the group; by default 60000 s, for long evaluations.
        init_timeout: timeout of bring-up.

    Returns:
        Whether it created the group. If so, the caller must call ``destroy_distributed()``.

    Raises:
        DistributedEnvironmentError: a variable is missing, empty, not a number or out of range; or
            a default group exists that contradicts the launcher, as in ``init_distributed``.
        DisagreementError, RendezvousTimeoutError, PeerFailedError: as ``init_distributed``.
    """
    if is_initialized():
        identity_in_group()  # raises if it contradicts the launcher
        return False
    if identify(os.environ).world_size == 1:
        return False
    bring_up(
        Request(
            operation="ensure_process_group",
            backend="gloo",
            timeout=as_timedelta(timeout, "timeout"),
            init_timeout=as_timedelta(init_timeout, "init_timeout"),
            device=torch.device("cpu"),
        )
    )
    return True


def bring_up(request: Request) -> DistributedContext:
    """Adopt the default group, or create it unless this process is alone. As init_distributed."""
    name_rank_in_records()
    if text := advisory_timeouts(os.environ):
        warn(f"{text}. Unset it; the default of torch is 3.", of_host=True)
    own, world = OwnGroups(request.init_timeout), tables.world()
    if world is not None:
        context = adopt(request, world, own)
    else:
        environment = identify(os.environ, address=True)
        sizes = request.mesh_sizes(environment.world_size)
        placement = choose_placement(request.backend, request.device, environment.local_rank)
        if environment.world_size == 1 and request.backend is None and sizes is None:
            context = alone(environment, placement, own)
        else:
            context = create(request, environment, placement, sizes, own)
    if request.seed is not None:
        set_seed(request.seed, context.mesh)
    return context


def alone(
    environment: DistributedEnvironment, placement: Placement, own: OwnGroups
) -> DistributedContext:
    """Use the device, without a group. Local."""
    placement.use()
    return DistributedContext(environment, placement.device, None, owned=False, own=own)


# -- a new group ------------------------------------------------------------------------------


def create(
    request: Request,
    environment: DistributedEnvironment,
    placement: Placement,
    sizes: Mapping[str, int] | None,
    own: OwnGroups,
) -> DistributedContext:
    """Create the default group and the mesh. Collective, blocking, with a timeout.

    If it raises, this process has no group.
    """
    select_interfaces(environment)
    try:
        store = open_store(environment, request.init_timeout, request.operation)
        placement.use()
        rendezvous = _join(request, environment, store)
        timeout = request.timeout or tables.default_timeout(placement.backend)
        device = placement.device

        def create_world() -> None:
            dist.init_process_group(
                placement.backend,
                store=store,
                rank=environment.rank,
                world_size=environment.world_size,
                timeout=timeout,
                device_id=device if request.bind and device.type != "cpu" else None,
            )

        creation = _Creation(request, environment.rank, placement, timeout, sizes, own)
        with jobs.expecting(rendezvous):
            mesh = creation.within(rendezvous, create_world)
        store.set_timeout(timeout)
    except BaseException:
        restore_interfaces()
        raise
    logging.getLogger(__name__).info(
        "rank %d of %d (%s): created the default group with %s on %s, timeout %g s",
        environment.rank,
        environment.world_size,
        environment.source,
        placement.backend,
        device,
        timeout.total_seconds(),
    )
    return DistributedContext(environment, device, mesh, owned=True, own=own)


def _join(request: Request, environment: DistributedEnvironment, store: Store) -> Rendezvous:
    """Take this process's place in the job. Blocking, with a timeout.

    Returns:
        The rendezvous, which the job uses from now on.

    Raises:
        DisagreementError: another process has this rank, or another world size. The ranks that
            wait for this one raise it too.
    """
    rank, size = environment.rank, environment.world_size
    seconds = request.init_timeout.total_seconds()
    if size == 1:
        return Rendezvous(None, rank, size, watches=True)
    rendezvous = Rendezvous(lambda: store, rank, size, watches=True)
    if difference := claim_place(rendezvous.client, environment, request.operation, seconds):
        _refuse(request, rendezvous, difference)
    rendezvous.count_job()  # before the others can count on this process
    return rendezvous


def _refuse(request: Request, rendezvous: Rendezvous, difference: str) -> NoReturn:
    """Raise on all ranks: this process has no place in the job.

    It counts neither the job nor itself among the processes of this host.
    """
    deadline = Deadline(request.operation, request.init_timeout.total_seconds(), _PHASES[0])
    refused = Decision("disagree", rendezvous.rank, difference)
    rendezvous.state.join(1)
    with suppress(ReloadpgError):
        now = rendezvous.drive(rendezvous.state.read(), deadline)
        if now.number == rendezvous.state.next:  # else the job has begun, and continues without it
            Round.open(rendezvous, request.operation, _PHASES, deadline.seconds).refuse(refused)
    raise refused.error(deadline, rendezvous.rank, rendezvous.size)


@dataclass
class _Creation:
    """Groups that a bring-up creates in a thread, within a round.

    If a peer died between agreement and connection, this rank would otherwise wait for all of
    ``timeout``, which may be hours.

    Attributes:
        own: the groups created since bring-up began.
        at: the current work, for messages.
    """

    request: Request
    rank: int
    placement: Placement
    timeout: timedelta
    sizes: Mapping[str, int] | None
    own: OwnGroups
    at: str = "creating groups"

    def within(
        self, rendezvous: Rendezvous, first: Callable[[], object] | None = None
    ) -> DeviceMesh | None:
        """Enter the bring-up, agree, call ``first``, create the mesh and wait for all ranks.

        On failure, the groups are aborted.
        """
        seconds = self.request.init_timeout.total_seconds()
        round_ = Round.open(rendezvous, self.request.operation, _PHASES, seconds)
        backend, sizes = self.placement.backend, self.sizes or {}
        mesh_dims = " x ".join(f"{name}={size}" for name, size in sizes.items()) or "none"
        arguments = {"backend": backend, "mesh_dims": mesh_dims, "connect": self.request.connect}
        round_.barrier("agree", Plan("init_distributed", (Entry("", (), arguments),)))
        made: list[DeviceMesh | None] = []
        wanted = CancelToken()

        def create() -> None:
            try:
                if first is not None:
                    self.at = f"creating the default group ({backend})"
                    first()
                if not wanted.cancelled:
                    made.append(self._create_mesh(wanted))
            except ReloadpgError:
                raise
            except RuntimeError as error:
                remedy = wrong_gloo_interfaces() if "gloo" in backend else ""
                raise self._error(f"failed at {self._where}: {error}", remedy) from error
            finally:
                if wanted.cancelled:  # the caller has raised and does not own later groups
                    self.own.abort()

        try:
            with round_:
                task = Task(create, "init_distributed")
                round_.watch([task], wanted, lambda: self._where)
                round_.barrier("connected")
        except BaseException:
            wanted.cancel()  # also if the wait for the thread has not begun
            self.own.abort()
            raise
        return made[0]

    @property
    def _where(self) -> str:
        return f"{self.at} over {interface_in_use()}"

    def _error(self, what: str, remedy: str) -> ReloadpgError:
        return ReloadpgError(
            f"{self.request.operation}: rank {self.rank} {what}. No group was created. "
            f"{remedy or _UNREACHABLE}"
        )

    def _create_mesh(self, token: CancelToken) -> DeviceMesh | None:
        """Create the mesh, if requested, and connect the groups created since bring-up began."""
        mesh, device = None, self.placement.device
        if self.sizes is not None:
            self.at = "creating the mesh"
            mesh = build_mesh(self.sizes, device.type, self.timeout)
        for group in self.own.now() if self.request.connect != "none" else ():
            if token.cancelled or group.size() == 1:
                continue
            kinds = tables.device_backends(group)
            desc, ranks = group.group_desc or "group", named_ranks(tables.ranks_of(group))
            self.at = f"connecting {desc!r} of {ranks} ({tables.backend_of(group)})"
            used = device if device.type in kinds else torch.device(next(iter(kinds)))
            sums = sum_ranks(group, used, token)
            if self.request.connect == "canary" and sums is not None and sums[0] != sums[1]:
                total, expected = sums
                raise self._error(
                    f"failed at {self._where}: the sum over the ranks is {total}, expected "
                    f"{expected}",
                    "The communicator does not connect the right ranks, or corrupts data.",
                )
        return mesh


# -- a group that exists ----------------------------------------------------------------------


def adopt(request: Request, world: ProcessGroup, own: OwnGroups) -> DistributedContext:
    """Use the default group, and create the mesh over it. Collective if there is a mesh."""
    environment, mesh = identity_in_group(), None
    sizes = request.mesh_sizes(environment.world_size)
    device = request.device or _device_of(world)
    _warn_of_differences(request, world)
    if sizes is not None:
        placement = Placement(device, tables.backend_of(world))
        timeout = request.timeout or _timeout_of(world) or tables.default_timeout(placement.backend)
        creation = _Creation(request, environment.rank, placement, timeout, sizes, own)
        mesh = creation.within(rendezvous_of(None, "init_distributed"))
    return DistributedContext(environment, device, mesh, owned=False, own=own)


def _device_of(world: ProcessGroup) -> torch.device:
    present = accelerator()
    if present is not None and present.type in tables.device_backends(world):
        index = devices.index_of_rank()
        here = torch.accelerator.current_device_index
        return torch.device(present.type, here() if index is None else index)
    return torch.device("cpu")


def _timeout_of(world: ProcessGroup) -> timedelta | None:
    """The longest current timeout of the group's backends; None while it is offloaded."""
    devices = tuple(tables.device_backends(world))
    return max(backends.get_timeouts(world, devices).values(), default=None)


def _warn_of_differences(request: Request, world: ProcessGroup) -> None:
    """Warn of requested settings that an existing group does not have."""
    differing, current = [], _timeout_of(world)
    backend, timeout = request.backend, request.timeout
    kinds = tables.device_backends(world)
    pairs = (f"{kind}:{name}" for kind, name in kinds.items())
    has = {tables.backend_of(world).lower(), *kinds.values(), *pairs}
    if backend is not None and not has.issuperset(str(backend).lower().split(",")):
        differing.append(f"backend {backend!r} (it has {tables.backend_of(world)!r})")
    # Gloo returns 60000 s as 60000.003 s on torch 2.15.
    slack = timedelta(milliseconds=10)
    if timeout is not None and current is not None and abs(timeout - current) > slack:
        differing.append(
            f"timeout {timeout.total_seconds():g} s (it has {current.total_seconds():g} s)"
        )
    if differing:
        logging.getLogger(__name__).warning(
            "the default group already exists and is adopted unchanged; requested but not "
            "applied: %s",
            ", ".join(differing),
        )
