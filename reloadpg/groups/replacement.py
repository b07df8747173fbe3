"""Groups of a process that replaces another one: created without the other ranks.

The other ranks already have these groups and do not take part in their creation. Each group is
created without a backend, under its existing name, and is in the state failed until a recovery
builds it.
"""

from __future__ import annotations

from typing import Any, cast

from torch.distributed import ProcessGroup

from .. import c10d
from ..errors import ReloadpgError
from ..texts import described
from .creation import Call, by_members, verbatim
from .registry import registry
from .sets import TRAINER


def is_without_backends(request: c10d.GroupRequest) -> bool:
    """Whether to create a group without a backend. Raises for a group that would bypass."""
    if request.size == 1:
        return False  # its creation waits for no other rank
    refuse_bypassed(request)
    return True


def refuse_bypassed(request: c10d.GroupRequest) -> None:
    """Refuse a group of a process that replaces another one, if it would bypass. Local."""
    options = registry.options
    bypass = options and options.selection.bypass(
        request.devices,
        request.size,
        name=request.name,
        desc=request.desc,
        is_world=request.is_world,
        in_set=TRAINER if request.is_world else options.selection.set_now(),
    )
    if bypass:
        raise ReloadpgError(
            f"group {request.name!r} ({described(request.desc, range(request.size))}) cannot be "
            "created: this process replaces one that has ended, so the other members do not take "
            f"part in its creation, and it is not reloadable: {bypass.reason}. Call "
            f"install({bypass.remedy}) in all ranks, before the job begins."
        )


def split_alone(call: Call) -> Any:
    """Create the group of a ``split_group`` call without the other ranks. Local."""
    given = call.given
    ranks = given.get("split_ranks")
    if not ranks:
        with verbatim():
            return call()  # torch raises the error
    parent = cast(ProcessGroup, given.get("parent_pg") or c10d.world())
    name, members = c10d.part_of_split(parent, ranks)
    if members is None:
        return c10d.non_member()
    backend = given.get("backend") or c10d.backend_of(parent)
    desc = given.get("group_desc") or f"{c10d.desc_of(parent)}:split"
    alone = by_members(members, given.get("timeout"), backend, desc)
    creation = c10d.CreationByMembers(
        name, c10d.store_of(parent), without_backends=is_without_backends
    )
    with verbatim(), creation:
        group = alone()
    group.bound_device_id = parent.bound_device_id  # as torch does, for any backend
    return group
