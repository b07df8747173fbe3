"""An asynchronous save of ``torch.distributed.checkpoint`` and an offload of its group."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import install, start
from helpers.sampling import sampled

import reloadpg

SHORT_S = 3.0
"""A timeout that is reached."""


def slow_writer(at: Path, begun: threading.Event, may_end: threading.Event) -> Any:
    """A writer that waits in the save's thread, before the collective in which the save ends."""
    from torch.distributed.checkpoint import FileSystemWriter

    class Writer(FileSystemWriter):
        def write_data(self, *args: Any, **kwargs: Any) -> Any:
            begun.set()
            assert may_end.wait(60)
            return super().write_data(*args, **kwargs)

    return Writer(at)


def end_save_when_awaited(may_end: threading.Event, ended: threading.Event) -> None:
    """End the save as soon as the offload waits for it, or has ended without waiting."""
    while not ended.wait(0.02):
        running = reloadpg.status().running
        if running is not None and "async_save" in running.doing:
            break
    may_end.set()


def is_complete(at: Path) -> bool:
    return (at / ".metadata").exists()


@pytest.mark.parametrize("wait", sampled([True, False], True))
@pytest.mark.parametrize("callbacks", sampled([True, False], True))
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.ranks(2)
def test_an_offload_waits_for_a_save_on_a_group_that_it_releases(
    early: bool, callbacks: bool, wait: bool, rank: int, tmp_path: Path
) -> None:
    """The checkpoint is complete on all ranks before a group is released (failure 37).

    Whether or not ``torch.distributed.checkpoint`` was imported before ``install``.
    """
    if early:
        importlib.import_module("torch.distributed.checkpoint")
    start()
    import torch.distributed.checkpoint as dcp

    group: Any = dist.new_group([0, 1])
    begun, may_end = threading.Event(), threading.Event()
    if callbacks:
        reloadpg.on_offload(lambda: None)
    state = {"weight": torch.full((4,), float(rank))}
    writer = slow_writer(tmp_path, begun, may_end)
    save: Any = dcp.async_save(state, storage_writer=writer, process_group=group)
    assert begun.wait(60)
    ended = threading.Event()
    end_when_awaited = threading.Thread(target=end_save_when_awaited, args=(may_end, ended))
    end_when_awaited.start()
    try:
        result: Any = reloadpg.offload(wait=wait)
        report = result if wait else result.result()
    finally:
        ended.set()
        end_when_awaited.join()
    assert save.done()
    assert is_complete(tmp_path)
    save.result()
    assert report.changed
    assert "saves" in report.phases_ms
    with pytest.raises(reloadpg.GroupOffloadedError):
        dist.barrier(group)
    reloadpg.reload()
    assert "saves" not in reloadpg.offload().phases_ms


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_save_that_outlasts_the_timeout_ends_the_offload_on_all_ranks(
    rank: int, tmp_path: Path
) -> None:
    """Nothing is changed: the groups are live, and the checkpoint is completed later."""
    start(timeout=SHORT_S)
    import torch.distributed.checkpoint as dcp

    group: Any = dist.new_group([0, 1])
    begun, may_end = threading.Event(), threading.Event()
    writer = slow_writer(tmp_path, begun, may_end)
    state = {"weight": torch.full((4,), float(rank))}
    save: Any = dcp.async_save(state, storage_writer=writer, process_group=group)
    assert begun.wait(60)
    with pytest.raises(reloadpg.RendezvousTimeoutError, match="async_save of a checkpoint"):
        reloadpg.offload()
    assert reloadpg.status().state == "live"
    may_end.set()
    save.result()
    assert is_complete(tmp_path)
    reloadpg.offload()


@pytest.mark.ranks(1)
def test_uninstall_restores_the_class_that_saves() -> None:
    """Also if its module was imported after ``install``; a second installation records again."""
    installation = install()
    from torch.distributed.checkpoint import _async_thread_executor as module

    saver = module._ThreadBasedAsyncCheckpointExecutor
    ours = saver.execute_save
    installation.uninstall()
    assert saver.execute_save is ours.__wrapped__
    with install():
        assert saver.execute_save.__wrapped__ is ours.__wrapped__
    assert saver.execute_save is ours.__wrapped__
