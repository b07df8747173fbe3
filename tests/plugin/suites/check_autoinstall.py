"""Tests of another project, run by ``test_plugin.py`` with RELOADPG_AUTOINSTALL=1."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import reloadpg

OWN = {"RELOADPG_AUTOINSTALL": "1", "RELOADPG_BACKENDS": "gloo"}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.reload_each_phase
def test_phases():
    dist.all_reduce(torch.ones(1))
    assert not reloadpg.is_installed() or reloadpg.status().generation == 1


@pytest.mark.ranks(1, backend="gloo")
def test_not_inherited():
    assert not reloadpg.is_installed()


@pytest.mark.ranks(2, backend="gloo", env=OWN)
def test_the_marks_own():
    assert type(dist.group.WORLD) is reloadpg.ReloadableProcessGroup
