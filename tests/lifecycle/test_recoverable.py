"""install(recoverable=True): NCCL's watchdog must not end the process before recover()."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import reloadpg
from reloadpg.c10d import tables

NEEDED = {
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "200",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NEEDED:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.removeprefix("TORCH_"), raising=False)
    yield
    reloadpg.uninstall()


def settings() -> dict[str, str]:
    return {name: os.environ[name] for name in NEEDED if name in os.environ}


def test_unset_variables_are_set_until_uninstall() -> None:
    """Without ``recoverable`` none is set."""
    reloadpg.install()
    assert settings() == {}
    reloadpg.uninstall()
    reloadpg.install(recoverable=True)
    assert settings() == NEEDED
    assert reloadpg.status().options["recoverable"] is True
    reloadpg.uninstall()
    assert settings() == {}


def test_an_install_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails while it makes the default group reloadable, and can be repeated."""

    def unreadable(group: dist.ProcessGroup) -> str:
        raise RuntimeError("cannot be read")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world, created = dist.group.WORLD, dist.new_group
        with monkeypatch.context() as patch:
            patch.setattr(dist.ProcessGroup, "group_desc", property(unreadable))
            with pytest.raises(RuntimeError, match="cannot be read"):
                reloadpg.install(recoverable=True, backends={"gloo"})
        assert not reloadpg.is_installed()
        assert (settings(), dist.group.WORLD) == ({}, world)
        assert dist.new_group is created
        reloadpg.install(recoverable=True)
        assert settings() == NEEDED
        reloadpg.uninstall()
    finally:
        dist.destroy_process_group()


def test_suitable_values_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable may have its old name."""
    given = {
        "NCCL_BLOCKING_WAIT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    reloadpg.install(recoverable=True)
    assert settings() == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    reloadpg.uninstall()
    assert "TORCH_NCCL_RETHROW_CUDA_ERRORS" not in os.environ
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_BLOCKING_WAIT", "1"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1"),
        ("TORCH_NCCL_ENABLE_MONITORING", "1"),
    ],
)
def test_unsuitable_values_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """The error names the variable; nothing is installed or set."""
    monkeypatch.setenv(name, value)
    current = name if name.startswith("TORCH") else f"TORCH_{name}"
    with pytest.raises(reloadpg.errors.InvalidOptionError, match=f"{current}={value}.*set it to"):
        reloadpg.install(backends={"nccl"}, recoverable=True)
    assert not reloadpg.is_installed()
    assert settings().keys() <= {name}


def test_the_default_of_torchrun_is_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sets 1 in its workers, which ends the process; ``uninstall`` restores it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    reloadpg.install(backends={"nccl"}, recoverable=True)
    assert settings() == NEEDED
    reloadpg.uninstall()
    assert settings() == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    with pytest.raises(reloadpg.errors.InvalidOptionError, match="set it to 2"):
        reloadpg.install(backends={"nccl"}, recoverable=True)


def test_without_nccl_any_value_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    reloadpg.install(backends={"gloo"}, recoverable=True)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_an_existing_nccl_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watchdog runs with other settings."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        config = tables.device_backends(dist.group.WORLD)  # type: ignore[arg-type]
        table = dist.distributed_c10d._world.pg_backend_config  # type: ignore[attr-defined]
        monkeypatch.setitem(table, dist.group.WORLD, ",".join(f"{d}:nccl" for d in config))
        with pytest.raises(
            reloadpg.errors.InvalidOptionError, match=r"NCCL groups .* were already created"
        ):
            reloadpg.install(recoverable=True)
        assert not reloadpg.is_installed()
        assert settings() == {}
    finally:
        dist.destroy_process_group()
