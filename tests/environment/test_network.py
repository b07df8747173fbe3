"""Network interfaces: real ones, created in a network namespace of the test."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reloadpg.environment import configure_network_environment, detect_ib_interface, network

REPORT = str(Path(__file__).parent / "network_report.py")

# A pair of virtual interfaces: the other end must be up too, or there is no carrier. ``ip`` shows
# such a one as ``ib0@other``.
ADD = "ip link add {0} type veth peer name x{0}; ip link set x{0} up; "
ADDRESS = "ip address add {1} dev {0}; "
UP = ADD + "ip link set {0} up; " + ADDRESS
ADDRESS_4 = "10.9.0.1/24"

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
    "link-local, then usable": (
        UP.format("ib0", "169.254.3.4/16") + ADDRESS.format("ib0", ADDRESS_4),
        "ib0",
    ),
    "another name": (UP.format("eth7", ADDRESS_4), None),
    "first of two": (UP.format("ib3", "10.9.3.1/24") + UP.format("ib1", "10.9.1.1/24"), "ib3"),
}

SCRIPT = """
import json, os
from reloadpg.environment import configure_network_environment, detect_ib_interface
before = dict(os.environ)
found = detect_ib_interface()
changes = configure_network_environment()
added = {k: v for k, v in os.environ.items() if before.get(k) != v}
print(json.dumps([found, changes, added]))
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


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize(("setup", "expected"), INTERFACES.values(), ids=INTERFACES)
def test_the_first_usable_infiniband_interface_is_found_and_used(
    setup: str, expected: str | None
) -> None:
    """Up, with carrier, with an address that is not link-local, and without its parent's name."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.endswith("_SOCKET_IFNAME") and not name.startswith(("TORCH_NCCL", "NCCL_"))
    }
    done = subprocess.run(
        ["unshare", "-n", "sh", "-ec", f'{setup}\nexec "$0" -c "$1"', sys.executable, SCRIPT],
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, changes, added = json.loads(done.stdout)
    assert found == expected
    wanted = {"NCCL_SOCKET_IFNAME": expected, "GLOO_SOCKET_IFNAME": expected, **INFINIBAND}
    wanted = wanted if expected else {}
    assert changes == added == wanted


def test_without_iproute2_no_interface_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without iproute2 gets None, not an exception."""
    monkeypatch.setattr(network.shutil, "which", lambda *_, **__: None)
    assert detect_ib_interface() is None
    assert configure_network_environment({}) == {}


@pytest.mark.parametrize("tool", ["#!/bin/sh\nexit 3\n", "#!/bin/sh\necho '{['\n", "not a program"])
def test_no_interface_is_found_if_ip_fails_or_prints_nonsense(
    tool: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bring-up continues without one."""
    path = os.path.join(str(tmp_path), "ip")
    with open(path, "w") as file:
        file.write(tool)
    os.chmod(path, 0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detect_ib_interface() is None


@pytest.mark.parametrize(
    ("preset", "gloo"),
    [
        ("ib7", "ib7"),
        ("bond0.12", "bond0.12"),
        ("lo", "lo"),
        ("^docker,lo", None),
        ("=eth0", None),
        ("ib0,ib1", None),
        ("", None),
        ("l", None),
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


def test_a_preset_gloo_interface_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only unset variables are set, with a preset NCCL interface and with InfiniBand."""
    environ = {"NCCL_SOCKET_IFNAME": "ib7", "GLOO_SOCKET_IFNAME": "eth0"}
    assert configure_network_environment(environ) == {}
    monkeypatch.setattr(network, "detect_ib_interface", lambda: "ib2")
    environ = {"GLOO_SOCKET_IFNAME": "eth0"}
    assert configure_network_environment(environ) == {"NCCL_SOCKET_IFNAME": "ib2", **INFINIBAND}
    assert environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert configure_network_environment(environ) == {}


@pytest.mark.parametrize(
    ("value", "warns"), [("0", True), ("1", False), ("3", False), (None, False)]
)
def test_nccl_error_handling_is_unchanged_and_0_is_a_warning(
    value: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not set to 1, which breaks the dumps of the flight recorder."""
    environ = {"NCCL_SOCKET_IFNAME": "^x"}
    if value is not None:
        environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = value
    before = dict(environ)
    with caplog.at_level(logging.WARNING):
        assert configure_network_environment(environ) == {}
    assert environ == before
    assert ("TORCH_NCCL_ASYNC_ERROR_HANDLING=0" in caplog.text) == warns


# ---------------------------------------------------------------------------------------------
# as a part of bring-up

FOUND = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0", **INFINIBAND}

BRING_UPS: dict[str, tuple[str, object, dict[str, str], dict[str, str]]] = {
    "auto": ("ib0", "auto", {}, FOUND),
    "auto, in part preset": (
        "ib0",
        "auto",
        {"NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"},
        {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_NET_GDR_LEVEL": "2"},
    ),
    "auto, nothing there": ("eth7", "auto", {}, {}),
    "off": ("ib0", "off", {}, {}),
    "mapping": (
        "ib0",
        {"NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"},
        {"NCCL_DEBUG": "INFO"},
        {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"},
    ),
}


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize(
    ("name", "network", "preset", "expected"),
    [
        pytest.param(*case, id=name, marks=[] if name == "auto" else [pytest.mark.slow])
        for name, case in BRING_UPS.items()
    ],
)
def test_bring_up_sets_network_variables_before_it_connects_and_restores_them(
    name: str, network: object, preset: dict[str, str], expected: dict[str, str]
) -> None:
    """Only unset variables, in one log line, on each of two ranks; restored however it ends."""
    ends = ["context"]
    if expected == FOUND:
        ends += ["exception", "destroy", "failure", "context"]
    prefixes = ("NCCL_", "GLOO_", "TORCH_NCCL")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    setup = "ip link set lo up; " + UP.format(name, ADDRESS_4)
    done = subprocess.run(
        [
            *("unshare", "-n", "sh", "-ec", f'{setup}\nexec "$0" "$@"'),
            *(sys.executable, REPORT, json.dumps([network, ends])),
        ],
        env={**environ, **preset, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [f"network: set {', '.join(f'{k}={v}' for k, v in expected.items())}"]
    for seen in json.loads(done.stdout.splitlines()[-1]):
        assert seen == [[expected, {}, told if expected else []]] * len(ends)
