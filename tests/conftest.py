"""Settings and fixtures of all tests."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import isolation

ROOT = Path(__file__).parent

WORLD = os.environ.get("TEST_WORLD", "unbound")

if WORLD.startswith("nccl") and not os.path.exists("/dev/nvidiactl"):
    from reloadpg.testing import standins

    standins.enable()  # before torch is imported

REWRITTEN = (
    "consumer_run",
    "cli.cli_process",
    "helpers.fault_job",
    "helpers.program_ranks",
    "helpers.programs",
    "test_fsdp",
    "test_megatron",
    "test_mesh",
)
"""Modules whose asserts pytest explains, although they are no test files."""

pytest.register_assert_rewrite(*REWRITTEN)

ONE_WORLD = (
    "c10d/test_memory",
    "groups/test_creation",
    "groups/test_dispatch",
    "groups/test_patches",
    "groups/test_selection",
    "lifecycle/test_autoinstall",
    "lifecycle/test_callbacks",
    "lifecycle/test_recoverable",
    "rendezvous/test_plan",
    "rendezvous/test_round",
    "rendezvous/test_store_client",
    "test_threads",
)
"""Tests without a world, or always with the same one: they do not run in another world again."""

collect_ignore = [f"{name}.py" for name in ONE_WORLD if WORLD != "unbound"]

NOT_ON_NCCL = {
    "groups/test_op_table.py::test_no_operation_succeeds_while_offloaded[monitored_bar": (
        "torch has it for gloo alone"
    ),
    "groups/test_replay.py::test_creating_functions_receive": "simulated",
    "lifecycle/test_bypassed.py": "gloo groups, which bypass by default",
    "lifecycle/test_faults.py": "faults of gloo; nccl/test_programs.py has NCCL's",
    "lifecycle/test_recover.py": "faults of gloo",
    "lifecycle/test_suspend.py::test_groups_of_a_backend_that_cannot_suspend": "NCCL can",
    "lifecycle/test_two_hosts.py": "faults of gloo",
}
"""Tests that a world on NCCL leaves out, by the start of their names, and why."""

LEFT_OUT = NOT_ON_NCCL if WORLD.startswith("nccl") else {}
"""What this world leaves out."""

LONGEST = (
    "benchmarks/test_benchmarks",
    "lifecycle/test_two_hosts",
    "lifecycle/test_faults",
    "frameworks/test_ray",
    "examples/test_scripts",
    "rendezvous/test_round",
    "lifecycle/test_bounds",
    "lifecycle/test_autoinstall",
    "testing/test_ranks",
    "environment/test_bringup",
    "rendezvous/test_protocol",
    "plugin/test_plugin",
    "lifecycle/test_recover",
    "consumers/test_compile",
    "environment/test_ownership",
    "lifecycle/test_suspend",
    "groups/test_identity",
    "examples/test_blocks",
    "environment/test_barrier",
    "integrations/test_slime",
    "integrations/test_colocated",
    "lifecycle/test_agreement",
    "cli/test_hangs",
    "cli/test_explain",
    "integrations/test_torch_memory_saver",
    "lifecycle/test_parallelism",
    "integrations/test_megatron_groups",
    "groups/test_op_table",
    "cli/test_doctor",
    "cli/test_status",
)

os.environ["RELOADPG_GRACE_S"] = "60"  # a rank that is slow to respond to a failure is not silent

# A TCPStore server looks up the host name of each client; one that cannot be found costs it 5 s by
# default, in which it serves no client. Read by the C library at its first look-up in a process.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Isolate the run, before a worker of pytest-xdist or a temporary folder is made."""
    if not hasattr(config, "workerinput"):
        isolation.isolate()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all modules of tests without garbage collection, and freeze what they hold.

    Each worker imports torch and what consumers need of it. Collections take a third of that time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the world cannot run, and begin with the files that take longest.

    All workers then end at about the same time.
    """
    places = {ROOT / f"{name}.py": place for place, name in enumerate(LONGEST)}
    gone = [item for item in items if any(map(_name(item).startswith, LEFT_OUT))]
    if gone:
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=gone)
    items.sort(key=lambda item: places.get(item.path, len(places)))


def _name(item: pytest.Item) -> str:
    return f"{item.path.relative_to(ROOT).as_posix()}::{item.nodeid.partition('::')[2]}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the world leaves out, and why."""
    if LEFT_OUT:
        terminalreporter.section(f"left out in the world {WORLD}")
        for name, reason in LEFT_OUT.items():
            terminalreporter.write_line(f"{name}: {reason}")


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that a store of the test can listen on, and that no other process is given.

    It is bound and not listened on; the store's own socket sets SO_REUSEADDR too.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]
