"""Asynchronous checkpoints (``async_save``) that are still being written when groups are offloaded.

The writer of each save waits for an event within its write, so the save is in flight for certain.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds

import reloadpg
from reloadpg.testing import run_ranks

pytestmark = [pytest.mark.matrix, worlds.unbound_only]

LONG_S = 120.0
"""Seconds; no rank waits so long."""


class Saves:
    """Saves whose writes wait for an event, and what came of them."""

    def __init__(self, folder: str) -> None:
        from torch.distributed import checkpoint

        self.may_write, self.writing = threading.Event(), threading.Event()
        may_write, writing = self.may_write, self.writing

        class Writer(checkpoint.FileSystemWriter):
            def write_data(self, *args: Any) -> Any:
                writing.set()
                assert may_write.wait(LONG_S)
                return super().write_data(*args)

        self.checkpoint, self.writer, self.folder = checkpoint, Writer, Path(folder)

    def begin(self, name: str, group: Any = None) -> Any:
        self.may_write.clear()
        self.writing.clear()
        state = {"weight": torch.full((4,), float(len(name)))}
        future = self.checkpoint.async_save(
            state, storage_writer=self.writer(self.folder / name), process_group=group
        )
        assert self.writing.wait(LONG_S)
        return future

    def loaded(self, name: str) -> list[float]:
        state = {"weight": torch.zeros(4)}
        self.checkpoint.load(state, checkpoint_id=self.folder / name)
        return state["weight"].tolist()


def error_of(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def offloads(rank: int, size: int, folder: str, early: bool) -> dict[str, Any]:
    """Three saves: on WORLD, on a group that keeps its communicator, and one that never ends.

    Args:
        early: import torch's module before the library is installed.
    """
    if early:
        import torch.distributed.checkpoint  # noqa: F401
    dist.init_process_group("gloo")
    kept = dist.new_group([0, 1])
    with pytest.warns(UserWarning, match="created before reloadpg.install"):
        reloadpg.install(backends={"gloo"}, timeout=timedelta(seconds=5))
    saves, seen = Saves(folder), {}

    waits = saves.begin("world")
    entered = threading.Event()
    remove = reloadpg.on_offload(entered.set)
    watch = threading.Thread(target=_let_go, args=(saves, seen), daemon=True)
    watch.start()
    report = reloadpg.offload()
    watch.join(LONG_S)
    remove()
    seen["done before release"] = waits.done() and error_of(waits.result) == ""
    seen["callbacks came later"] = entered.is_set()
    seen["phase"] = "checkpoint" in report.phases_ms
    reloadpg.reload()
    seen["world"] = saves.loaded("world")

    goes_on = saves.begin("kept", kept)
    report = reloadpg.offload()
    seen["kept in flight"] = not goes_on.done()
    seen["kept phase"] = "checkpoint" in report.phases_ms
    saves.may_write.set()
    seen["kept error"] = error_of(lambda: goes_on.result(LONG_S))
    reloadpg.reload()
    seen["kept"] = saves.loaded("kept")

    stuck = saves.begin("stuck")
    seen["refused"] = error_of(reloadpg.offload)
    seen["state"] = reloadpg.status().state
    saves.may_write.set()
    seen["stuck error"] = error_of(lambda: stuck.result(LONG_S))
    reloadpg.offload()
    reloadpg.reload()
    seen["stuck"] = saves.loaded("stuck")
    return seen


def _let_go(saves: Saves, seen: dict[str, Any]) -> None:
    """Let the write go on once the offload waits for it."""
    while True:
        running = reloadpg.status().running
        if running is not None and "asynchronous checkpoint" in running.doing:
            break
        threading.Event().wait(0.01)
    seen["state while waiting"] = reloadpg.status().state
    saves.may_write.set()


@pytest.mark.parametrize("early", [False, True], ids=["installed first", "imported first"])
def test_an_offload_waits_for_saves_on_groups_that_it_releases(tmp_path: Path, early: bool) -> None:
    """They are whole before callbacks run and before anything is released.

    A save on a group that keeps its communicator continues through the offload. One that does not
    end is named within the timeout, the groups stay live, and the next offload completes.
    """
    for rank in run_ranks(offloads, 2, args=(str(tmp_path), early), timeout=200):
        assert rank["refused"].startswith("RendezvousTimeoutError"), rank["refused"]
        assert "stuck" in rank["refused"]
        assert "asynchronous checkpoint that is still being saved" in rank.pop("refused")
        assert rank == {
            "state while waiting": "live",
            "done before release": True,
            "callbacks came later": True,
            "phase": True,
            "world": [5.0] * 4,
            "kept in flight": True,
            "kept phase": False,
            "kept error": "",
            "kept": [4.0] * 4,
            "state": "live",
            "stuck error": "",
            "stuck": [5.0] * 4,
        }


def uninstalled(rank: int, size: int) -> dict[str, Any]:
    from torch.distributed.checkpoint._async_thread_executor import (
        _ThreadBasedAsyncCheckpointExecutor as Executor,
    )

    own = vars(Executor)["execute_save"]
    states = []
    for _ in range(2):
        reloadpg.install(backends={"gloo"})
        wrapper: Any = vars(Executor)["execute_save"]
        states.append((wrapper is not own, wrapper.__wrapped__ is own))
        reloadpg.uninstall()
        states.append((vars(Executor)["execute_save"] is own,))
    return {"states": states}


def test_torchs_method_is_its_own_again_after_uninstall() -> None:
    """One wrapper layer while installed, none afterwards."""
    [seen] = run_ranks(uninstalled, 1)
    assert seen["states"] == [(True, True), (True,)] * 2
