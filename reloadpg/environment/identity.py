"""Strict reading of variables and arguments, and the identity of a process in its job.

Every error names the variable or argument and its value. Does not import torch.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..errors import ReloadpgError

LOOPBACK = "127.0.0.1"
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
FIRST_PORT = 15000
LAST_PORT = 30000

_INTEGER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9_.:%-]+", re.ASCII)
_PORTS = LAST_PORT - FIRST_PORT + 1
# Coprime to _PORTS (7 * 2143). The first 211 steps of 71 consecutive jobs have different ports,
# since jobs on one host were usually submitted close to each other.
_STRIDE = 211


class DistributedEnvironmentError(ReloadpgError, OSError, ValueError):
    """The launcher's variables do not identify this process; nothing was opened or written."""


AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
"""Variables of a job whose store is open: rank 0, too, is a client. Torch (2.8 to 2.15) uses the
count to tell runs of an elastic job apart; here each run has a separate store."""


def host_store(address: str) -> Any:
    """Open the store of a job in this process, on a port that the system picks. Local.

    No other program can take the port. The store lives as long as the returned object.
    """
    distributed: Any = import_module("torch.distributed")  # the rest of this module needs no torch
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=1024)
    return distributed.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


@dataclass(frozen=True)
class DistributedEnvironment:
    """Identity of a process in its job: a plain value.

    Attributes:
        source: source of all fields: ``torchrun``, ``slurm``, ``openmpi``, ``single``, or
            ``process_group`` for a group created by other means.
        rank: number of this process, from 0 to ``world_size - 1``.
        local_rank: number of this process on its node; None if unknown.
        world_size: number of processes of the job.
        local_world_size: number of processes on this node; None if unknown.
        node_rank: number of this node; None if unknown.
        num_nodes: number of nodes; None if unknown.
        master_addr: host of the rendezvous store.
        master_port: its port. 0 in a world of 1: any free port, chosen when it is needed. None for
            a group that exists.
    """

    source: str
    rank: int
    local_rank: int | None
    world_size: int
    local_world_size: int | None
    node_rank: int | None
    num_nodes: int | None
    master_addr: str = LOOPBACK
    master_port: int | None = 0

    def variables(self) -> dict[str, str]:
        """Return the variables that torchrun would set for this process. Local.

        For libraries that read them: ``os.environ.update(detect_environment().variables())``.
        Unknown values are omitted. A world of 1 without a port gets one that is free on the
        loopback interface.
        """
        port = _free_port() if self.master_port == 0 else self.master_port
        values = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.num_nodes,
            "MASTER_ADDR": None if port is None else self.master_addr,
            "MASTER_PORT": port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


@contextmanager
def write_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process in a block. Local. One that has changed since is kept."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if os.environ.get(name) == values[name]:
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


# -- variables ----------------------------------------------------------------------------------


class Variables:
    """The variables of one launcher, ``source``. The mapping is only read."""

    def __init__(self, environ: Mapping[str, str], source: str) -> None:
        self._environ = environ
        self.source = source

    def __contains__(self, name: str) -> bool:
        return name in self._environ

    def error(self, what: str, call: str = "") -> DistributedEnvironmentError:
        """An error with the state and the remedy appended."""
        remedy = call or f"Correct it, or unset the {self.source} variables."
        return DistributedEnvironmentError(f"{what}. Nothing was opened or written. {remedy}")

    def require(self, names: Iterable[str], others: Iterable[str] = ()) -> None:
        """Raise unless all ``names`` are set; list the missing ones, and the others.

        Args:
            names: the variables. One that cannot be set, such as ``A or B``, counts as missing.
            others: further variables that belong to them.
        """
        wanted = list(names)
        missing = [name for name in wanted if name not in self]
        if not missing:
            return
        present = dict.fromkeys(name for name in (*others, *wanted) if name in self)
        seen = ", ".join(f"{name}={self._environ[name]!r}" for name in present)
        raise self.error(
            f"The {self.source} variables are only partly set: missing {', '.join(missing)}"
            + (f"; set are {seen}" if seen else ""),
            call="Set the missing ones, or unset all of them.",
        )

    def any_of(self, names: Iterable[str]) -> bool:
        """Whether one of them is set."""
        return any(name in self for name in names)

    def text(self, name: str) -> str:
        """A value that is not empty."""
        value = self._environ[name]
        if not value.strip():
            raise self.error(f"{name}={value!r} is empty")
        return value

    def host(self, name: str) -> str:
        """A host name or address without a port."""
        value = self.text(name)
        inner = value.removeprefix("[").removesuffix("]")
        if value == f"[{inner}]" and ip_of(inner) is not None:
            raise self.error(f"{name}={value!r} has brackets", f"Set it to {inner}, without them.")
        if not _HOST.fullmatch(value) or (":" in value and ip_of(value) is None):
            raise self.error(f"{name}={value!r} is not a host name or address")
        return value

    def port(self, world_size: int) -> int:
        """``MASTER_PORT``, which may be 0 in a world of 1."""
        value = self.text("MASTER_PORT")
        if "://" in value:
            raise self.error(
                f"MASTER_PORT={value!r} is an address: Kubernetes sets this variable in the pods "
                f"of a namespace that has a service named 'master'",
                "Set MASTER_PORT to the number of the port in the pod's env, rename the service, "
                "or set enableServiceLinks: false in the pod's spec.",
            )
        return self.integer("MASTER_PORT", minimum=min(1, world_size - 1), maximum=65535)

    def integer(self, name: str, *, minimum: int = 0, maximum: int | None = None) -> int:
        """A decimal number in ``minimum..maximum``, without ``+``, blanks or underscores."""
        text = self.text(name)
        if not _INTEGER.fullmatch(text):
            raise self.error(f"{name}={text!r} is not a whole number")
        value = int(text)
        if value < minimum:
            kind = "negative" if value < 0 else f"below {minimum}"
            raise self.error(f"{name}={text!r} is {kind}")
        if maximum is not None and value > maximum:
            raise self.error(f"{name}={text!r} is above {maximum}")
        return value

    def below(self, name: str, limit_name: str, limit: int) -> int:
        """A number from 0 to ``limit - 1``; ``limit_name`` names the limit in messages."""
        value = self.integer(name)
        if value >= limit:
            raise self.error(f"{name}={self._environ[name]!r} is not below {limit_name}={limit}")
        return value


def ip_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Read a text as an IP address, with or without a zone; None if it is no address. Pure."""
    with suppress(ValueError):
        return ipaddress.ip_address(text.partition("%")[0])
    return None


def port_from_ids(*ids: str) -> int:
    """A port in 15000..30000, equal on all ranks of a run of a launcher. Local, pure.

    Below the usual range of ephemeral ports (32768 and up). Two steps of one job of SLURM have
    different ports unless their ids differ by a multiple of 15001.
    """
    number = 0
    for one in ids:
        number = number * _STRIDE + (int(one) if one.isdecimal() else zlib.crc32(one.encode()))
    return FIRST_PORT + number % _PORTS
