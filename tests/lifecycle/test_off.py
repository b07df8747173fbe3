"""``RELOADPG=off``: torch is unchanged, and every call does nothing."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import reloadpg
from reloadpg import recovery
from reloadpg.cli.doctor import diagnose
from reloadpg.errors import InvalidOptionError

OFF = {"RELOADPG": "off"}


def total(group: Any = None) -> float:
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item()


@pytest.mark.matrix
@pytest.mark.ranks(2, env=OFF)
@pytest.mark.parametrize("installs", [True, False])
def test_every_call_does_nothing(installs: bool, rank: int) -> None:
    """No group is a proxy, no rank waits for another one, and one line is logged."""
    creating = dist.new_group
    if installs:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("reloadpg").addHandler(handler)
        for _ in range(2):
            reloadpg.install(backends={"gloo"}, recoverable=True)
        assert len(lines) == (os.environ["LOCAL_RANK"] == "0")  # once a host
        assert all(line.startswith("RELOADPG=off: ") for line in lines)
    assert not reloadpg.is_installed()
    assert dist.new_group is creating
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    assert type(group) is type(dist.group.WORLD) is ProcessGroup
    assert total() == total(group) == 2.0
    made: Any = reloadpg.register_group(group, rebuild=lambda: group)
    assert made is group
    if rank == 0:  # local: the other rank makes no call
        for report in (
            reloadpg.offload(),
            reloadpg.offload(wait=False).result(),
            reloadpg.reload(connect="canary"),
            recovery.recover("a test"),
        ):
            assert not report.changed
            assert report.groups == ()
        assert not recovery.recovery_requested()
        with reloadpg.offloaded():
            assert total.__name__ == "total"
    with reloadpg.offloaded():
        assert total(group) == 2.0  # it is not released
    found = reloadpg.status()
    assert (found.off, found.installed, found.groups) == (True, False, ())
    assert str(found).startswith("reloadpg: off, by RELOADPG=off, rank ")
    reloadpg.uninstall()
    dist.destroy_process_group()


def test_doctor_says_so() -> None:
    findings = diagnose(environ={**os.environ, **OFF})
    assert [one.level for one in findings if "RELOADPG=off" in one.message] == ["warning"]


@pytest.mark.ranks(1)
def test_another_value_is_refused() -> None:
    os.environ["RELOADPG"] = "offf"
    with pytest.raises(InvalidOptionError, match="RELOADPG='offf' is neither on nor off"):
        reloadpg.install()


@pytest.mark.ranks(2)
def test_it_does_not_change_an_installation() -> None:
    """A variable that is set later, or a process that has none, is as without it."""
    reloadpg.install(backends={"gloo"})
    os.environ |= OFF
    dist.init_process_group("gloo")
    assert len(reloadpg.offload().groups) == 1
    assert len(reloadpg.reload().groups) == 1
    assert not reloadpg.status().off
