"""Registration of groups that were created by hand: released and rebuilt with the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch.distributed import ProcessGroup

from ..c10d import tables
from ..errors import InvalidOptionError, NotInstalledError
from .creation import HANDED_OVER, Call, Construction
from .proxy import ReloadableProcessGroup
from .registry import registry
from .sets import TRAINER


def register_group(
    group: ProcessGroup, *, rebuild: Callable[[], ProcessGroup]
) -> ReloadableProcessGroup:
    """Make a group reloadable that was not created by a patched function.

    For groups that code creates by hand with ``_new_process_group_helper``, for example the
    weight-update group between trainer ranks and a rollout engine, whose members may be processes
    outside the job. :func:`reloadpg.offload` then releases it with the others, and
    :func:`reloadpg.reload` calls ``rebuild`` after all others are live. Use the returned object in
    place of ``group``; ``torch.distributed`` finds it in its tables, too.

    Local; call it on each rank of the job that is a member. Members outside the job must destroy
    and rebuild the group at the same times. The set is chosen as for a group that is created here.

    Args:
        group: the live group, which must be in c10d's tables.
        rebuild: recreates the group and returns it; called in a separate thread, on each reload.
            It may wait for the other members, within the ``timeout`` of ``install``, and may use
            the same group name again.

    Returns:
        The reloadable group. Idempotent; a group that is reloadable already is returned as it is.
        With ``RELOADPG=off`` each group is.

    Raises:
        NotInstalledError: ``install`` was not called; nothing was changed.
        InvalidOptionError: the group is not known to torch.distributed, or ``rebuild`` cannot be
            called; nothing was changed.
    """
    if registry.off:
        return cast(ReloadableProcessGroup, group)
    if registry.selection is None:
        raise NotInstalledError(
            "register_group() was called, but reloadpg is not installed; nothing was changed. Call "
            "reloadpg.install() first."
        )
    if not callable(rebuild):
        raise InvalidOptionError(
            f"register_group(rebuild={rebuild!r}): not callable; nothing was changed. Pass a "
            "function."
        )
    if isinstance(group, ReloadableProcessGroup):
        return group
    set_name = registry.selection.set_now() or TRAINER
    if not isinstance(group, ProcessGroup) or not tables.is_known(group) or group is tables.world():
        raise InvalidOptionError(
            f"register_group({group!r}): not a group of torch.distributed other than the default "
            "group; nothing was changed. Pass the live group that the creating function returned."
        )
    entry, place = tables.entry_of(group), (*HANDED_OVER, tables.name_of(group))
    call, devices = Call(rebuild, (), {}), tuple(entry.devices)
    construction = Construction(call, entry, devices, group.rank(), place=place)
    proxy = ReloadableProcessGroup(group, construction)
    proxy._managed.join(set_name)
    return proxy
