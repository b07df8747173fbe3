"""Settings and fixtures of all tests."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import isolation
import pytest

ROOT = Path(__file__).parent

pytest.register_assert_rewrite(
    "cli_process",
    "consumer_run",
    "consumer_tests",
    "fault_job",
    "recovery_job",
    "suspend_job",
    "test_ddp",
    "test_fsdp",
    "test_megatron",
    "test_mesh",
)

# What makes no world of its own, or always the same one, runs once: not in a bound world again.
collect_ignore = [
    f"{name}.py"
    for name in (
        "groups/test_batching",
        "groups/test_creation",
        "groups/test_dispatch",
        "groups/test_patches",
        "groups/test_selection",
        "lifecycle/test_autoinstall",
        "lifecycle/test_callbacks",
        "lifecycle/test_exits",
        "lifecycle/test_memory",
        "lifecycle/test_recoverable",
        "lifecycle/test_strategy",
        "rendezvous/test_plan",
        "rendezvous/test_round",
        "rendezvous/test_store_client",
        "rendezvous/test_worker_thread",
        "observability/test_trace",
    )
    if os.environ.get("TEST_WORLD") == "bound"
]

LONGEST = (
    "benchmarks/test_benchmarks",
    "lifecycle/test_two_hosts",
    "lifecycle/test_faults_of_recovery",
    "lifecycle/test_rejoin",
    "testing/test_ranks",
    "examples/test_scripts",
    "lifecycle/test_training_through_faults",
    "groups/test_compiled_collectives",
    "lifecycle/test_autoinstall",
    "environment/test_launchers",
    "environment/test_network",
    "frameworks/test_unmodified_scripts",
    "consumers/test_compile",
    "plugin/test_plugin",
    "lifecycle/test_suspend_faults",
    "examples/test_blocks",
    "cli/test_doctor",
    "environment/test_bringup",
    "frameworks/test_ray",
    "observability/test_publish",
    "cli/test_hangs",
    "rendezvous/test_round",
    "integrations/test_megatron_groups",
    "groups/test_op_table",
    "environment/test_ownership",
    "cli/test_status",
    "groups/test_identity",
)

# A TCPStore server looks up the host name of each client; one that cannot be found costs it 5 s by
# default, in which it serves nobody. Read by the C library at its first look-up in a process.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Isolate the run, before a worker of pytest-xdist or a temporary folder is made."""
    if not hasattr(config, "workerinput"):
        isolation.isolate()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that all workers end at about the same time."""
    places = {ROOT / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that a store of the test can listen on, and that nobody else is given meanwhile.

    It is bound and not listened on; the store's own socket sets SO_REUSEADDR too.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]
