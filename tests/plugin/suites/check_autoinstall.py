"""Tests of another project, run by ``test_plugin.py`` with RELOADPG_AUTOINSTALL=1."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import reloadpg

OWN = {"RELOADPG_AUTOINSTALL": "1", "RELOADPG_BACKENDS": "gloo"}


@pytest.mark.ranks(1, backend="gloo")
def test_not_inherited():
    assert not reloadpg.is_installed()


@pytest.mark.ranks(2, backend="gloo", env=OWN)
def test_the_marks_own():
    assert type(dist.group.WORLD) is reloadpg.ReloadableProcessGroup
