"""Which launcher started this process, and as which process of which job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from reloadpg.environment.launchers import from_lsf, from_openmpi, from_pmi, from_torchrun
from reloadpg.environment.model import DistributedEnvironment
from reloadpg.environment.slurm import from_slurm, is_daemon_step

__all__ = ["detect_environment"]

SINGLE = DistributedEnvironment(
    source="single",
    rank=0,
    local_rank=0,
    world_size=1,
    local_world_size=1,
    node_rank=0,
    num_nodes=1,
)


def detect_environment(environ: Mapping[str, str] | None = None) -> DistributedEnvironment:
    """Say who this process is in its job, from its launcher's variables.

    Local, non-blocking, pure: it reads, writes nothing, opens no socket and imports no torch.
    All fields come from the first of these that is there; two are never combined:

    1. torchrun: ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``,
       ``MASTER_PORT`` (and ``GROUP_RANK``, ``GROUP_WORLD_SIZE`` if set);
    2. a SLURM step (before PMI, which srun sets as well); the shell of an allocation is one
       process;
    3. LSF's jsrun; 4. OpenMPI's mpirun; 5. PMI (MPICH, Intel MPI, Cray);
    6. a single process: rank 0 of 1.

    Under SLURM the ranks meet on the first host of the step's node list, at a port derived from
    job and step id, also where ``MASTER_ADDR`` is set alone. LSF reads its host list. OpenMPI and
    PMI hand out no address: on one host the ranks meet on the loopback interface; on more,
    ``MASTER_ADDR`` and ``MASTER_PORT`` must be set. A world of 1 has port 0: any free one.

    Ranks of a node that are not consecutive are logged as a warning.

    Args:
        environ: the variables; ``os.environ`` if None.

    Raises:
        DistributedEnvironmentError: a launcher's variables are incomplete (the message lists what
            is missing), empty, not numbers, or out of range. Also an OSError and a ValueError.
    """
    variables = os.environ if environ is None else environ
    found = from_torchrun(variables)
    if found is None:
        mpi = from_openmpi(variables) if is_daemon_step(variables) else None
        if mpi is not None and str(mpi.world_size) != variables["SLURM_STEP_NUM_TASKS"]:
            return mpi
        found = from_slurm(variables)
    for source in (from_lsf, from_openmpi, from_pmi):
        if found is None:
            found = source(variables)
    return SINGLE if found is None else found
