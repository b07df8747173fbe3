"""Network interfaces: real ones, created in a network namespace of the test."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.in_turn import variables

import reloadpg
from reloadpg.environment import configure_network_environment, network

# A pair of virtual interfaces: the other end must be up too, or there is no carrier. ``ip`` shows
# such a one as ``ib0@other``.
ADD = "ip link add {0} type veth peer name x{0}; ip link set x{0} up; "
ADDRESS = "ip address add {1} dev {0}; "
UP = ADD + "ip link set {0} up; " + ADDRESS
ADDRESS_4 = "10.9.0.1/24"
ROUTED = {"MASTER_ADDR": "10.9.0.1", "TORCHELASTIC_RESTART_COUNT": "1"}  # not the store before

INFINIBAND = {"NCCL_IB_DISABLE": "0", "NCCL_NET_GDR_LEVEL": "2"}
INTERFACES = {
    "none": ("true", None),
    "up": (UP.format("ib0", ADDRESS_4), "ib0"),
    "down": ((ADD + ADDRESS).format("ib0", ADDRESS_4), None),
    "down, second up": (
        (ADD + ADDRESS).format("ib0", ADDRESS_4) + UP.format("ib1", "10.9.1.1/24"),
        "ib1",
    ),
    "no address": (ADD.format("ib0") + "ip link set ib0 up", None),
    "no carrier": (UP.format("ib0", ADDRESS_4) + "ip link set xib0 down", None),
    "partition with parent": (
        ADD.format("ib0") + "ip link set ib0 up; "
        "ip link add link ib0 name ib0.8001 type macvlan; ip link set ib0.8001 up; "
        + ADDRESS.format("ib0.8001", ADDRESS_4),
        "ib0.8001",
    ),
    "IPv4 link-local only": (UP.format("ib0", "169.254.3.4/16"), None),
    "IPv6 link-local only": (UP.format("ib0", "fe80::1/64 nodad"), None),
    "IPv6 global": (UP.format("ib0", "fd00:1::1/64 nodad"), "ib0"),
    "IPv4 link-local, IPv6 global": (
        UP.format("ib0", "169.254.3.4/16") + ADDRESS.format("ib0", "fd00:1::1/64 nodad"),
        "ib0",
    ),
    "another name": (UP.format("eth7", ADDRESS_4), None),
    "first of two": (UP.format("ib3", "10.9.3.1/24") + UP.format("ib1", "10.9.1.1/24"), "ib3"),
}

SCRIPT = """
import json, os, socket, subprocess, sys
from reloadpg.environment.network import configure_network_environment, detect_ib_interface

def run(command):
    subprocess.run(["sh", "-ec", command], check=True)

before, seen = dict(os.environ), {}
for name, setup in json.loads(sys.argv[1]).items():
    run(setup)
    found, changes = detect_ib_interface(), configure_network_environment()
    added = {k: v for k, v in os.environ.items() if before.get(k) != v}
    seen[name] = found, changes, added
    for key in added:
        del os.environ[key]
    for _, one in socket.if_nameindex():
        if one.startswith("x"):
            run(f"ip link delete {one}")
print(json.dumps(seen))
"""


def namespaces_missing() -> str:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip (iproute2) or unshare not installed"
    done = subprocess.run(
        ["unshare", "-n", "ip", "link", "add", "ib0", "type", "veth"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else ""


MISSING = namespaces_missing()


@pytest.fixture(scope="module")
def seen() -> dict[str, tuple[str | None, dict[str, str], dict[str, str]]]:
    """What is found with the interfaces of each case, one after the other in one namespace."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.endswith("_SOCKET_IFNAME") and not name.startswith(("TORCH_NCCL", "NCCL_"))
    }
    setups = {name: setup for name, (setup, _) in INTERFACES.items()}
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", SCRIPT, json.dumps(setups)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("name", INTERFACES)
def test_the_first_usable_infiniband_interface_is_found_and_used(
    name: str, seen: dict[str, tuple[str | None, dict[str, str], dict[str, str]]]
) -> None:
    """Up, with carrier, with an address that is not link-local, and without its parent's name."""
    expected = INTERFACES[name][1]
    wanted = {"NCCL_SOCKET_IFNAME": expected, "GLOO_SOCKET_IFNAME": expected, **INFINIBAND}
    wanted = wanted if expected else {}
    assert seen[name] == [expected, wanted, wanted]


@pytest.mark.parametrize(
    ("preset", "gloo"),
    [
        *((name, name) for name in ("ib7", "bond0.12", "lo")),
        *((form, None) for form in ("^docker,lo", "=eth0", "ib0,ib1", "", "l")),
    ],
)
def test_a_preset_interface_is_kept_and_copied_for_gloo_only_if_it_is_one_name(
    preset: str, gloo: str | None
) -> None:
    """Gloo has no exclusion, exact-match, list and prefix forms (``l`` for ``lo``), as NCCL has."""
    environ = {"NCCL_SOCKET_IFNAME": preset}
    changes = configure_network_environment(environ)
    assert changes == ({} if gloo is None else {"GLOO_SOCKET_IFNAME": gloo})
    assert environ == {"NCCL_SOCKET_IFNAME": preset, **changes}


def test_preset_variables_are_kept_with_infiniband(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only unset variables are set."""
    monkeypatch.setattr(network, "detect_ib_interface", lambda: "ib2")
    environ = {"GLOO_SOCKET_IFNAME": "eth0"}
    assert configure_network_environment(environ) == {"NCCL_SOCKET_IFNAME": "ib2", **INFINIBAND}
    assert environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert configure_network_environment(environ) == {}


@pytest.mark.parametrize(("value", "warns"), [("0", True), ("1", False)])
def test_nccl_error_handling_is_unchanged_and_0_is_a_warning(
    value: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not set to 1, which breaks the dumps of the flight recorder."""
    environ = {"NCCL_SOCKET_IFNAME": "^x", "TORCH_NCCL_ASYNC_ERROR_HANDLING": value}
    with caplog.at_level(logging.WARNING):
        assert configure_network_environment(environ) == {}
    assert ("TORCH_NCCL_ASYNC_ERROR_HANDLING=0" in caplog.text) == warns


# ---------------------------------------------------------------------------------------------
# as a part of bring-up

FOUND = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0", **INFINIBAND}

PARTLY = {"NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
ENDS = ("context", "exception", "destroy", "failure", "context")
BRING_UPS: list[tuple[str, object, dict[str, str], dict[str, str]]] = [
    ("ib0", "auto", {}, FOUND),
    ("ib0", "auto", PARTLY, {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_NET_GDR_LEVEL": "2"}),
    ("ib0", "off", {}, {}),
    ("eth7", "auto", {}, {}),
    ("eth7", "auto", ROUTED, dict.fromkeys(network.SOCKET_VARIABLES, "eth7")),
    ("eth7", "auto", {**ROUTED, "NCCL_SOCKET_IFNAME": "^lo"}, {}),
]
"""The name of the interface, ``network``, preset variables, and those that are set."""

NEW_NETWORK = 0x40000000
"""CLONE_NEWNET: a network namespace of the calling thread, and of those that it starts."""


def enter_namespace(rank: int) -> None:
    """Put both ranks into one new network namespace. Only the loopback interface is up in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    shared = Path(os.environ["TMPDIR"], "namespace")
    if rank == 0:
        assert libc.unshare(NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        shared.with_suffix(".new").write_text(f"/proc/{os.getpid()}/ns/net")
        shared.with_suffix(".new").rename(shared)
        return
    while not shared.exists():
        time.sleep(0.01)
    with open(shared.read_text()) as namespace:
        assert libc.setns(namespace.fileno(), NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())


def bring_up(network: Any, end: str, look: Callable[[], None]) -> None:
    """Come up, look, and end like this."""
    options: dict[str, Any] = {"network": network, "init_timeout": 60}
    if end == "failure":

        def create(store: dist.Store, rank: int, size: int, _: object) -> None:
            look()
            store.set(f"{rank} has looked", "")  # the first failure ends the others' bring-up
            store.wait([f"{other} has looked" for other in range(size)], timedelta(minutes=1))
            raise OSError("no group today")

        dist.Backend.register_backend("broken", create, devices=["cpu"])
        reloadpg.environment.init_distributed("cpu:broken", **options)
    context = reloadpg.environment.init_distributed(**options)
    if end == "destroy":
        look()
        reloadpg.environment.barrier("both have looked")
        reloadpg.environment.destroy_distributed()
        return
    with context:
        look()
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 2
        if end == "exception":
            raise ValueError("on all ranks")


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.ranks(1)
def test_the_interface_that_routes_to_an_address_is_found() -> None:
    """Also where the host name is a loopback address, for a job of several hosts (failure 38)."""
    enter_namespace(0)
    assert network.routing_interface("localhost", other_hosts=True) is None
    setup = UP.format("eth7", ADDRESS_4)
    subprocess.run(["sh", "-ec", setup], check=True, capture_output=True)
    address = ROUTED["MASTER_ADDR"]
    assert network.routing_interface(address) == "eth7"
    assert network.routing_interface("no such host") is None
    assert network.routing_interface("127.0.1.1") is None
    subprocess.run(["ip", "route", "add", "default", "dev", "eth7"], check=True)
    assert network.routing_interface("127.0.1.1", other_hosts=True) == "eth7"


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.ranks(2, store="rank0", env={"GLOO_SOCKET_IFNAME": None})
def test_bring_up_sets_network_variables_before_it_connects_and_restores_them(rank: int) -> None:
    """Only unset variables, in one log line, on each of two ranks; restored however it ends."""
    enter_namespace(rank)
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reloadpg.environment.network").addHandler(handler)
    logging.getLogger("reloadpg").setLevel(logging.INFO)
    between = dist.FileStore(os.path.join(os.environ["TMPDIR"], "between"), 2)
    for number, (name, option, preset, expected) in enumerate(BRING_UPS):
        if rank == 0:
            setup = (
                f"ip link delete xib0 || ip link delete xeth7 || true; {UP.format(name, ADDRESS_4)}"
            )
            subprocess.run(["sh", "-ec", setup], check=True, capture_output=True)
            between.set(f"interface {number}", "up")
        between.wait([f"interface {number}"], timedelta(minutes=1))
        told = [f"network: set {', '.join(f'{k}={v}' for k, v in expected.items())}"]
        with variables(preset):
            before = dict(os.environ)
            for end in ENDS if expected == FOUND else ENDS[:1]:
                inside: dict[str, str] = {}
                lines.clear()
                with suppress(ValueError, OSError, reloadpg.PeerFailedError):
                    bring_up(option, end, lambda into=inside: into.update(os.environ))
                assert inside == {**before, **expected}, (name, option, end)
                assert dict(os.environ) == before, (name, option, end)
                assert lines == (told if expected else []), (name, option, end)
        between.set(f"rank {rank} is out of {number}", "")
        between.wait([f"rank {one} is out of {number}" for one in range(2)], timedelta(minutes=1))
