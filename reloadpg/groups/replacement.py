"""Groups of a process that replaces another one: they are created without the other ranks.

The others have these groups, and do not take part in their creation: each is created without any
backend, under the name that it has there, and is failed until a recovery builds it.
"""

from __future__ import annotations

from typing import Any, cast

from torch.distributed import ProcessGroup

from .. import c10d
from ..errors import ReloadpgError, described
from ..rendezvous.predecessor import Predecessor
from .creation import Call, verbatim
from .proxy import ReloadableProcessGroup
from .registry import registry
from .sets import TRAINER

__all__ = ["Places", "await_members", "is_without_backends", "replaces", "split_alone"]


class Places:
    """Whether the default group that is created takes a place in a job that goes on.

    Attributes:
        taken: the place; None if the job begins.
    """

    def __init__(self) -> None:
        self.taken: Predecessor | None = None

    def take(self, asked: c10d.Asked) -> bool:
        """Take the place in the job that the store tells of, if there is one. Bounded."""
        if not asked.is_world or asked.size == 1 or "fake" in asked.devices.values():
            return False
        self.taken = Predecessor.find(asked.store, asked.rank, asked.size)
        if self.taken is not None:
            _refuse_bypassed(asked)
        return self.taken is not None


def replaces() -> bool:
    """Whether this process replaces another one and has not rejoined its job."""
    job = registry.known_job
    return job is not None and job.rendezvous.replaces


def is_without_backends(asked: c10d.Asked) -> bool:
    """Whether a group of this process is created without any backend; refuse those that bypass."""
    if asked.size == 1:
        return False  # whatever it is, it waits for no other rank
    _refuse_bypassed(asked)
    return True


def _refuse_bypassed(asked: c10d.Asked) -> None:
    options = registry.options
    bypass = options and options.selection.bypass(
        asked.devices,
        asked.size,
        name=asked.name,
        desc=asked.desc,
        is_world=asked.is_world,
        in_set=TRAINER if asked.is_world else options.selection.set_now(),
    )
    if bypass:
        raise ReloadpgError(
            f"group {asked.name!r} ({described(asked.desc, range(asked.size))}) cannot be created: "
            "this process replaces one that has ended, so the other members do not take part in "
            f"its creation, and it is not reloadable: {bypass.reason}. Call "
            f"install({bypass.remedy}) in all ranks, before the job begins."
        )


def split_alone(call: Call) -> Any:
    """Create what ``split_group`` would, without the other ranks. Local."""
    given = call.given
    ranks = given.get("split_ranks")
    if not ranks:
        with verbatim():
            return call()  # torch says what is wrong with it
    parent = cast(ProcessGroup, given.get("parent_pg") or c10d.world())
    name, members = c10d.part_of_split(parent, ranks)
    if members is None:
        return c10d.non_member()
    kwargs = {
        "ranks": members,
        "timeout": given.get("timeout"),
        "backend": given.get("backend") or c10d.backend_of(parent),
        "use_local_synchronization": True,
        "group_desc": given.get("group_desc") or f"{c10d.desc_of(parent)}:split",
        **({} if c10d.sorts_ranks() else {"sort_ranks": False}),
    }
    creation = c10d.CreationByMembers(
        name, c10d.store_of(parent), without_backends=is_without_backends
    )
    with verbatim(), creation:
        made = c10d.original("new_group")(**kwargs)
    made.bound_device_id = parent.bound_device_id  # whatever devices it serves, as torch does
    return made


def await_members(proxy: ReloadableProcessGroup) -> None:
    """Leave a group without backends failed, until ``rejoin`` meets its other members. Local."""
    made = proxy.construction
    proxy.await_members(
        "This process replaces one that has ended.",
        "Call reloadpg.rejoin() once all groups are created.",
        made.timeout or c10d.default_timeout(made.backend),
    )
