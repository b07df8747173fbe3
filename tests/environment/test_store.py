"""The store of a bring-up, when several threads of a process open it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore

from reloadpg import RendezvousTimeoutError
from reloadpg.environment import DistributedEnvironment
from reloadpg.environment.store import open_store

FAR, SOON = 600.0, 100.0


class Server:
    """An address whose store is not served until :meth:`serve` is called."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.settimeout(SOON)
        self._port = self._listener.getsockname()[1]

    def open(self, seconds: float) -> Future[Store]:
        """Open the store as rank 1, in another thread."""
        environment = DistributedEnvironment(
            "test", 1, 0, 2, None, None, None, "127.0.0.1", self._port
        )
        return self._pool.submit(open_store, environment, timedelta(seconds=seconds))

    def await_connection(self) -> None:
        """Accept connections from now on. Wait for the one that is made before torch's."""
        self._listener.listen()
        self._listener.accept()[0].close()

    def serve(self) -> None:
        """Respond to all connections, earlier ones too. Idempotent."""
        if self._listener.fileno() == -1:
            return
        self._listener.listen()
        self._store = TCPStore(
            "127.0.0.1",
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )


@pytest.fixture
def server() -> Iterator[Server]:
    with ThreadPoolExecutor() as pool:
        made = Server(pool)
        yield made
        made.serve()  # so that no thread waits any longer


def test_a_thread_waits_with_its_own_timeout_for_a_store_that_another_one_opens(
    server: Server,
) -> None:
    first = server.open(FAR)
    server.await_connection()
    second = server.open(0.5)
    with pytest.raises(RendezvousTimeoutError, match=r"no store responded .* within 0\.5 s"):
        second.result(SOON)
    assert not first.done()
    third = server.open(FAR)
    server.serve()
    first.result(SOON).set("key", "of the first")
    third.result(SOON).set("key", "of the third")
    assert first.result().get("key") == b"of the first"  # each use has separate keys


def test_a_thread_tries_again_if_the_one_that_opened_the_store_fails(server: Server) -> None:
    first = server.open(0.5)
    second = server.open(FAR)
    for failing in (first, server.open(1.0)):
        with pytest.raises(RendezvousTimeoutError):
            failing.result(SOON)
    server.serve()
    second.result(SOON).set("key", "")
