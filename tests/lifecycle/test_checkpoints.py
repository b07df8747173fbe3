"""An asynchronous save of ``torch.distributed.checkpoint`` during an offload."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.jobs import start

import reloadpg


class SlowWriter(dcp.FileSystemWriter):
    """A writer that waits in the save's thread, before the collective in which the save ends."""

    def __init__(self, at: Path) -> None:
        super().__init__(at)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        self.begun.set()
        assert self.may_end.wait(60)
        return super().write_data(*args, **kwargs)


@pytest.mark.ranks(2)
def test_a_save_through_a_group_that_bypasses_continues_while_others_are_offloaded(
    rank: int, tmp_path: Path
) -> None:
    """No group of the save is released, so the checkpoint is complete (failure 37)."""
    start(exclude="saving")
    saving: Any = dist.new_group(backend="gloo", group_desc="saving")
    writer = SlowWriter(tmp_path)
    state = {"weight": torch.full((4,), float(rank))}
    save: Any = dcp.async_save(state, storage_writer=writer, process_group=saving)
    assert writer.begun.wait(60)
    reloadpg.offload()
    assert not save.done()
    writer.may_end.set()
    save.result()
    assert (tmp_path / ".metadata").exists()
    reloadpg.reload()
