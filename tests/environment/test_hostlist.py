"""The host at which the ranks of a SLURM step meet."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from reloadpg.environment import DistributedEnvironmentError
from reloadpg.environment.slurm import from_slurm

FIRST = {
    "node1": "node1",
    "node[1-3,7]-ib": "node1-ib",
    "rack[1-2]node[3-4]": "rack1node3",
    "n[08-11]": "n08",
    "n[1,03,5-6].site": "n1.site",
    "login,n[1-2],gpu[3]x": "login",
    "n[5],m[1-2]": "n5",
    "10.0.0.[1-2]": "10.0.0.1",
}


def _host(nodes: str) -> str:
    numbers = dict.fromkeys(("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    identity = from_slurm({**numbers, **step, "SLURM_STEP_NODELIST": nodes})
    assert identity is not None
    return identity.address()[0]


@pytest.mark.parametrize(("nodes", "host"), FIRST.items(), ids=FIRST)
def test_ranks_meet_on_the_first_host(nodes: str, host: str) -> None:
    """With ranges, suffixes, several brackets and zero padding."""
    assert _host(nodes) == host


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="scontrol (slurm-wlm) not installed")
@pytest.mark.parametrize("nodes", [t for t in FIRST if not re.search(r"][^,[]", t)])
def test_the_first_host_is_the_one_that_scontrol_prints_first(nodes: str, tmp_path: Path) -> None:
    """For lists without suffixes, which it refuses (22.05)."""
    config = tmp_path / "slurm.conf"
    config.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    done = subprocess.run(
        ["scontrol", "show", "hostnames", nodes],
        env={**os.environ, "SLURM_CONF": str(config)},
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    assert done.stdout.split()[0] == _host(nodes)


@pytest.mark.parametrize("nodes", [",", "n[1-2", "n1-2]", "n[[1]]", "n[]", "n[a-b]", "n[1]x y"])
def test_a_malformed_list_is_an_error_that_quotes_it(nodes: str) -> None:
    """There is no guess."""
    with pytest.raises(DistributedEnvironmentError, match="SLURM_STEP_NODELIST") as caught:
        _host(nodes)
    assert repr(nodes) in str(caught.value)
