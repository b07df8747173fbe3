"""The locks that a backend holds while one of its calls waits for other ranks.

The order that all ranks share prevents a deadlock between threads that wait for peers only if a
thread that waits holds nothing that another thread of its process needs. Otherwise, two ranks whose
threads acquire a lock in different orders wait for each other. Two facts decide whether it holds:

============ ===================================== =========================================
NCCL's call  waits for                             source
============ ===================================== =========================================
init         all members                           NCCL's user guide
split        all ranks of the parent               NCCL's user guide
first use    all members: NCCL connects them       NVIDIA's host code 2.30.7, without a GPU
finalize     no rank                               NVIDIA's host code 2.30.7, without a GPU
destroy      the members on this node, if the      the same; user guide ("intra-node collective")
             communicator is connected
abort        no rank                               the same
suspend      all members                           user guide
resume       all members                           user guide
register     no rank                               NCCL's source (``ncclCommRegister`` is local)
deregister   no rank                               the same
============ ===================================== =========================================

The second fact is the lock that the backend holds in these calls: :data:`LOCKS`. It decides how the
calls that wait are made:

* The lock of one communicator: in parallel threads.
* A lock that other communicators share: not while it is held. ``ProcessGroupNCCL2`` (the default
  of torch 2.15) has one mutex for a communicator and all that were split from it, and torch splits
  every group from WORLD there. Such communicators are destroyed each in an NCCL group call, whose
  end needs no mutex: so in parallel threads. (An abort would wait for no rank. After it, torch's
  ``shutdown`` prints a warning with a C++ stack, and the destructor one without: 2.15.0.) A replay
  never splits, so each communicator that it creates has a separate mutex.
* An unknown lock: one group at a time, in the shared order, unless ``install(parallelism=...)``
  says otherwise.

``ProcessGroupNCCL2`` holds its lock in the first use too, so no abort ends that wait. A reload that
connects groups therefore runs an all-reduce on each.

``suspend`` and ``resume`` are called without torch's lock. A call that waits for no rank may be
made under any lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any


class Lock(Enum):
    """What shares the lock that a backend holds in a call of its communication library."""

    COMMUNICATOR = "one communicator"
    FAMILY = "a communicator and all that were split from it"
    UNKNOWN = "unknown"


LOCKS = {
    "ProcessGroupGloo": Lock.COMMUNICATOR,
    "ProcessGroupNCCL": Lock.COMMUNICATOR,  # NCCLComm::mutex_
    "ProcessGroupNCCL2": Lock.FAMILY,  # NcclApi::api_mutex_; a split takes its parent's
    "ProcessGroupNCCLLazy": Lock.FAMILY,
}
"""The lock by the class of the backend object; that of any other class is unknown.

Observed with a call that hangs in one group (an injected fault) and calls of other groups, on
torch 2.8.0 and on both engines of 2.15.0, over stand-ins for CUDA and NCCL.
"""

_KNOWN_NAMES = frozenset({"gloo", "nccl", "nccl-legacy", "nccl2", "nccl-lazy"})
"""The names under which torch creates these classes."""


def needs_one_thread(names: Iterable[str]) -> bool:
    """Whether groups of these backends are best created and released one at a time."""
    return not _KNOWN_NAMES.issuperset(names)


def shares_lock(backends: Iterable[Any]) -> bool:
    """Whether a split of one of these backends uses the lock of its parent."""
    return any(LOCKS.get(type(backend).__name__) is Lock.FAMILY for backend in backends)
