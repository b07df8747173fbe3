"""Settings and fixtures of all tests."""

from __future__ import annotations

import os
import socket

import isolation
import pytest

pytest.register_assert_rewrite(
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

# A TCPStore server looks up the host name of each client; one that cannot be found costs it 5 s by
# default, in which it serves nobody. Read by the C library at its first look-up in a process.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Isolate the run, before a worker of pytest-xdist or a temporary folder is made."""
    if not hasattr(config, "workerinput"):
        isolation.isolate()


@pytest.fixture
def free_port() -> int:
    """A port of this host that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
