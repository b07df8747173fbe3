"""Launchers: detection of the job that started this process, and the rank before a group exists.

torchrun, LSF's jsrun, OpenMPI and PMI; SLURM has a separate module. Does not import torch.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn, ParamSpec, TypeVar

from .model import (
    ADDRESS,
    LOOPBACK,
    DistributedEnvironment,
    DistributedEnvironmentError,
    Identity,
    Variables,
    check_layout,
    ip_of,
    on_nodes_of,
    port_from_text,
)
from .slurm import from_slurm, is_daemon_step

P = ParamSpec("P")
R = TypeVar("R")

_ALONE = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
ENV = ("RANK", "WORLD_SIZE", *ADDRESS)
"""The variables that torch's ``init_method="env://"`` requires."""

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

SINGLE = Identity("single", **on_nodes_of(1, 0, 1), address=lambda: (LOOPBACK, 0))


def detect_environment(environ: Mapping[str, str] | None = None) -> DistributedEnvironment:
    """Return the identity of this process in its job, from its launcher's variables.

    Local, non-blocking, pure: it writes nothing, opens no socket and does not import torch. The
    first available source is used:

    1. torch's variables: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, as for
       torchrun and ``init_method="env://"``;
    2. a SLURM step (before PMI, which srun sets as well); the shell of an allocation is one
       process;
    3. LSF's jsrun;
    4. OpenMPI's mpirun;
    5. PMI (MPICH, Intel MPI, Cray);
    6. a single process: rank 0 of 1.

    Local and node ranks that are not set are inferred if that is certain: in a world of 1, if the
    ranks meet on the loopback interface, and from another launcher with the same rank and world
    size. Otherwise they are None. Some of torch's variables together with another launcher's (a
    script that exports ``RANK`` and ``WORLD_SIZE`` from SLURM's) must agree with it.

    ``MASTER_ADDR`` and ``MASTER_PORT`` are each used if set, with any launcher. Otherwise the ranks
    meet on the first host of the list of SLURM or LSF, at a port derived from the ids of job and
    step. OpenMPI and PMI provide no address: on one host the ranks meet on the loopback interface;
    on several, ``MASTER_ADDR`` must be set. A world of 1 has port 0: any free port.

    Warns if the ranks of a node are not consecutive, and if torch's variables say that this process
    is alone while another launcher started several (variables that an earlier job has left).

    Args:
        environ: the variables; ``os.environ`` if None.

    Raises:
        DistributedEnvironmentError: the variables are incomplete (the message lists the missing
            ones), contradict each other, are empty, not numbers, or out of range. Also an OSError
            and a ValueError.
    """
    return identify(os.environ if environ is None else environ).environment()


def identify(environ: Mapping[str, str]) -> Identity:
    """Return the identity of this process, without the address. Local, pure."""
    read = Variables(environ, "torchrun")
    if read.first(*TORCHRUN) is None:
        return _from_launcher(environ) or SINGLE
    own = _from_torch(read)
    if own is not None and all(name in read for name in ENV):
        return _with_places(own, environ)
    launcher = _from_launcher(environ)
    if launcher is not None:
        _check_agreement(read, launcher)
        return launcher
    return own or _incomplete(read)


def _from_launcher(environ: Mapping[str, str]) -> Identity | None:
    """The identity from a launcher other than torchrun, or None."""
    if is_daemon_step(environ):
        mpi = _from_mpi(environ, _OPENMPI)
        if mpi is not None and str(mpi.world_size) != environ["SLURM_STEP_NUM_TASKS"]:
            return mpi
    found = (_from_mpi(environ, names) for names in (_LSF, _OPENMPI, _PMI))
    return from_slurm(environ) or next(filter(None, found), None)


def _with_places(own: Identity, environ: Mapping[str, str]) -> Identity:
    """Add the local and node ranks of another launcher with the same rank and world size."""
    if own.local_rank is not None and own.local_world_size is not None and own.world_size > 1:
        return own
    try:
        launcher = _from_launcher(environ)
    except DistributedEnvironmentError:
        return own
    if launcher is not None and own.world_size == 1 < launcher.world_size:
        if "TORCHELASTIC_RUN_ID" not in environ:  # torchrun in each task sets it
            _warn_of_stale_variables(launcher.source, launcher.rank, launcher.world_size)
        return own
    if launcher is None or (launcher.rank, launcher.world_size) != (own.rank, own.world_size):
        return own
    return replace(
        own,
        local_rank=launcher.local_rank if own.local_rank is None else own.local_rank,
        local_world_size=launcher.local_world_size,
        node_rank=launcher.node_rank,
        num_nodes=launcher.num_nodes,
    )


@functools.cache  # once: the rank is looked up often
def _warn_of_stale_variables(source: str, rank: int, world_size: int) -> None:
    logging.getLogger(__name__).warning(
        "RANK=0 and WORLD_SIZE=1 are set, so this process is a job of one, but %s started it as "
        "task %d of %d. If it belongs to a job of %d ranks, these variables are left from another "
        "one: unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT before the launcher is called",
        source,
        rank,
        world_size,
        world_size,
    )


def _check_agreement(read: Variables, launcher: Identity) -> None:
    said = {name: getattr(launcher, name.lower()) for name in TORCHRUN}
    differing = [name for name in said if name in read and read.integer(name) != said[name]]
    if differing:
        listed = ", ".join(f"{name}={read.text(name)!r}, not {said[name]}" for name in differing)
        raise read.error(
            f"The torchrun variables are only partly set: missing "
            f"{', '.join(name for name in ENV if name not in read)}; the rest contradicts "
            f"{launcher.source}: {listed}",
            call=f"Set {', '.join(ENV)}, or unset {', '.join(differing)}.",
        )


# -- the rank ---------------------------------------------------------------------------------


def is_initialized() -> bool:
    """Whether this process has a default group. Local; imports no torch."""
    distributed = sys.modules.get("torch.distributed")
    return (
        distributed is not None
        and bool(distributed.is_available())
        and bool(distributed.is_initialized())
    )


def get_rank() -> int:
    """Return the rank of this process: of the default group or, before it exists, the launcher.

    Local, non-blocking; does not import torch. Also works under srun and mpirun, where ``RANK`` is
    not set. Requires no address.

    Raises:
        DistributedEnvironmentError: there is no group, and the variables do not define the rank, or
            contradict each other.
    """
    if is_initialized():
        return int(sys.modules["torch.distributed"].get_rank())
    return identify(os.environ).rank


def is_rank_zero() -> bool:
    """Whether this process is rank 0; see :func:`get_rank`. Local, non-blocking."""
    return get_rank() == 0


def rank_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Make ``function`` do nothing, and return None, on every rank but 0.

    The rank is looked up at each call, not at decoration, since a module is often imported before
    the group exists. Local: no rank waits for another.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if is_rank_zero() else None

    return wrapper


# -- launchers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """The variable names of an MPI-like launcher; ``A|B`` means either."""

    source: str
    numbers: tuple[str, str, str, str]
    """Rank, size, local rank, local size."""
    job: tuple[str, ...]
    """Variables that identify one run of the launcher on its hosts."""


def _numbers(prefix: str) -> tuple[str, str, str, str]:
    return f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"


_LSF = _Names("lsf", _numbers("JSM_NAMESPACE"), ("LSB_JOBID",))
_OPENMPI = _Names(
    "openmpi", _numbers("OMPI_COMM_WORLD"), ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
)
_PMI = _Names(
    "pmi",
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID|PMI_LOCAL_RANK", "MPI_LOCALNRANKS|PMI_LOCAL_SIZE"),
    ("PMI_JOBID",),
)


def _from_torch(read: Variables) -> Identity | None:
    """The identity from torch's variables, or None if they define no rank.

    ``LOCAL_RANK=0`` alone only selects a device; it does not imply several ranks.
    """
    if "WORLD_SIZE" not in read:
        if "RANK" in read:
            rank = read.integer("RANK")
            places = dict.fromkeys(("local_rank", "local_world_size", "node_rank", "num_nodes"))
            return Identity(
                "torchrun", rank, world_size=0, address=lambda: _incomplete(read), **places
            )
        alone = all(read.integer(name) == least for name, least in _ALONE.items() if name in read)
        return SINGLE if alone else None
    world_size = read.integer("WORLD_SIZE", minimum=1)
    if "RANK" not in read and world_size > 1:
        return None
    rank = read.below("RANK", "WORLD_SIZE", world_size) if "RANK" in read else 0
    local_rank, local_size = _local(read, rank, world_size)
    num_nodes = node_rank = None
    if "GROUP_WORLD_SIZE" in read:
        num_nodes = read.integer("GROUP_WORLD_SIZE", minimum=1, maximum=world_size)
    elif local_size is not None:
        num_nodes = -(-world_size // local_size)
    if "GROUP_RANK" in read and num_nodes is not None:
        node_rank = read.below("GROUP_RANK", "GROUP_WORLD_SIZE", num_nodes)
    elif local_size is not None and num_nodes is not None:
        node_rank = min(rank // local_size, num_nodes - 1)
    full = num_nodes is not None and num_nodes * (local_size or 0) == world_size
    if full and local_rank is not None and node_rank is not None:
        first = node_rank * (local_size or 0)
        check_layout("torchrun", rank=rank, local_rank=local_rank, first=first)

    def address() -> tuple[str, int]:
        if world_size > 1:
            read.require(ENV)
        return read.address(world_size, lambda: LOOPBACK, lambda: 0)

    return Identity(
        source="torchrun",
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        address=address,
    )


def _incomplete(read: Variables) -> NoReturn:
    raise read.missing([name for name in ENV if name not in read], (*TORCHRUN, *ADDRESS))


def _local(read: Variables, rank: int, world_size: int) -> tuple[int | None, int | None]:
    """Local rank and local world size; None if neither set nor certain."""
    local_size = None
    if "LOCAL_WORLD_SIZE" in read:
        local_size = read.integer("LOCAL_WORLD_SIZE", minimum=1, maximum=world_size)
    elif world_size == 1 or ("MASTER_ADDR" in read and _is_loopback(read.host("MASTER_ADDR"))):
        local_size = world_size
    if "LOCAL_RANK" in read:
        if local_size is None:
            return read.below("LOCAL_RANK", "WORLD_SIZE", world_size), None
        return read.below("LOCAL_RANK", "LOCAL_WORLD_SIZE", local_size), local_size
    if local_size == world_size:
        return rank, local_size
    return (0 if local_size == 1 else None), local_size


def _is_loopback(host: str) -> bool:
    address = ip_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _from_mpi(environ: Mapping[str, str], names: _Names) -> Identity | None:
    """The identity of a process of one of these launchers, or None.

    The shell of an LSF job, which has ``LSB_JOBID`` but no task number, is not a task.
    """
    read = Variables(environ, names.source)
    if read.first(*(part for name in names.numbers for part in name.split("|"))) is None:
        return None
    read.require(names.numbers)
    rank_name, size_name, local_name, local_size_name = (
        read.first(*name.split("|")) or name for name in names.numbers
    )
    world_size = read.integer(size_name, minimum=1)
    rank = read.below(rank_name, size_name, world_size)
    local_size = read.integer(local_size_name, minimum=1, maximum=world_size)
    local_rank = read.below(local_name, local_size_name, local_size)
    place = on_nodes_of(local_size, rank, world_size) | {"local_rank": local_rank}
    if place["num_nodes"] * local_size == world_size:
        first = place["node_rank"] * local_size
        check_layout(names.source, rank=rank, local_rank=local_rank, first=first)
    return Identity(
        names.source,
        **place,
        address=lambda: read.address(
            world_size,
            lambda: _derived_host(read, names, world_size=world_size, local_size=local_size),
            lambda: _derived_port(read, names, world_size=world_size),
        ),
    )


def _derived_host(read: Variables, names: _Names, *, world_size: int, local_size: int) -> str:
    """The ranks' host if they share one; otherwise, the first host of LSF's list."""
    if local_size == world_size:
        return LOOPBACK
    host = _lsf_host(read) if names is _LSF else ""
    if not host:
        read.require((*names.numbers, "MASTER_ADDR"))
    return host


def _derived_port(read: Variables, names: _Names, *, world_size: int) -> int:
    if world_size == 1:
        return 0
    # Two runs in one job share jsrun's job id; PMIx identifies the run.
    wanted = dict.fromkeys((*names.job, "PMIX_NAMESPACE"))
    ids = [read.text(name) for name in wanted if name in read]
    if not ids:
        read.require((*names.numbers, "|".join((*names.job, "MASTER_PORT"))))
    return port_from_text(*ids)


def _lsf_host(read: Variables) -> str:
    """The first compute host of an LSF job.

    ``LSB_MCPU_HOSTS`` is ``host slots host slots ...``. With jsrun the first entry is the launch
    node, with one slot and no task, when compute hosts follow.
    """
    if "LSB_MCPU_HOSTS" not in read:
        return ""
    words = read.text("LSB_MCPU_HOSTS").split()
    pairs = list(zip(words[::2], words[1::2], strict=False))
    if len(words) % 2 or not all(slots.isdecimal() for _, slots in pairs):
        raise read.error(f"LSB_MCPU_HOSTS={' '.join(words)!r} is not pairs of host and slots")
    if len(pairs) > 1 and int(pairs[0][1]) == 1:
        pairs = pairs[1:]
    return pairs[0][0]
