"""SLURM's compressed lists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reloadpg.environment.slurm import (
    count_hosts,
    expand_counts,
    expand_hostlist,
    first_host,
)

LISTS = {
    "node1": ["node1"],
    "node[1-3,7]-ib": ["node1-ib", "node2-ib", "node3-ib", "node7-ib"],
    "rack[1-2]node[3-4]": ["rack1node3", "rack1node4", "rack2node3", "rack2node4"],
    "n[08-11]": ["n08", "n09", "n10", "n11"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "n[1,03,5-6].site": ["n1.site", "n03.site", "n5.site", "n6.site"],
    "login,n[1-2],gpu[3]x": ["login", "n1", "n2", "gpu3x"],
    "a[1-2]b[1-2]c[1-2]": [f"a{i}b{j}c{k}" for i in (1, 2) for j in (1, 2) for k in (1, 2)],
    "n[5-5]": ["n5"],
    "10.0.0.[1-2]": ["10.0.0.1", "10.0.0.2"],
}


@pytest.mark.parametrize(("text", "hosts"), LISTS.items(), ids=LISTS)
def test_every_bracket_form_expands_in_order(text: str, hosts: list[str]) -> None:
    """Ranges, lists, suffixes, several brackets and zero padding; first and count agree."""
    assert expand_hostlist(text) == hosts
    assert first_host(text) == hosts[0]
    assert count_hosts(text) == len(hosts)


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="scontrol (slurm-wlm) not installed")
@pytest.mark.parametrize("text", LISTS, ids=LISTS)
def test_the_hosts_are_those_of_scontrol(text: str, tmp_path: Path) -> None:
    """SLURM's own tool gives the same first host and the same hosts, where it is installed.

    In the same order with up to two brackets. Lists with a suffix it refuses (22.05), although
    NodeName lines may have them.
    """
    config = tmp_path / "slurm.conf"
    config.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    done = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env={**os.environ, "SLURM_CONF": str(config)},
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    if "Invalid hostlist" in done.stderr:
        assert re.search(r"][^,[]", text), "refused, although it has no suffix"
        return
    hosts = done.stdout.split()
    assert hosts[0] == first_host(text)
    assert sorted(hosts) == sorted(expand_hostlist(text))
    if text.count("[") <= 2:
        assert hosts == expand_hostlist(text)


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,,b", "n[1-2", "n1-2]", "n[[1]]", "n[]", "n[3-1]", "n[a-b]", "n[1-2]x y", "n[1,]"],
)
def test_a_malformed_list_is_a_value_error_that_quotes_it(text: str) -> None:
    """No guess is made about a broken list."""
    with pytest.raises(ValueError, match="host list") as caught:
        expand_hostlist(text)
    assert repr(text) in str(caught.value)


def test_a_huge_list_is_counted_and_its_head_read_without_expanding_it() -> None:
    """A thousand million hosts cost nothing to count; expanding them is refused."""
    text = "n[0-999999999]x[0-9]"
    assert count_hosts(text) == 10**10
    assert first_host(text) == "n0x0"
    with pytest.raises(ValueError, match="10000000000 hosts"):
        expand_hostlist(text)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2(x1),3", [1, 2, 3])],
)
def test_task_counts_expand(text: str, counts: list[int]) -> None:
    """One count a node, in node order."""
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "4(x", "4(x0)", "x2", "4,,3", "4(x99999999)", "-1"])
def test_malformed_task_counts_are_value_errors(text: str) -> None:
    """No guess is made about a broken count."""
    with pytest.raises(ValueError, match="in "):
        expand_counts(text)


@given(
    st.lists(
        st.tuples(st.integers(0, 999), st.integers(0, 20), st.integers(1, 4)),
        min_size=1,
        max_size=4,
    )
)
@settings(deadline=None)
def test_any_bracket_has_as_many_hosts_as_its_ranges(ranges: list[tuple[int, int, int]]) -> None:
    """For all ranges: the count, the first and the padding are those of the numbers written out."""
    text = ",".join(f"{low:0{width}d}-{low + more:0{width}d}" for low, more, width in ranges)
    expected = [
        f"n{number:0{max(width, len(str(low)))}d}"
        for low, more, width in ranges
        for number in range(low, low + more + 1)
    ]
    assert expand_hostlist(f"n[{text}]") == expected
    assert count_hosts(f"n[{text}]") == len(expected)
