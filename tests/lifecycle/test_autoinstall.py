"""RELOADPG_AUTOINSTALL: ``import torch`` installs, and never fails because of it.

Each interpreter finds the entry point in a separate distribution on its path, so tests do not
depend on how the package is installed. One test reads the installed metadata.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.launching import distribution
from helpers.sampling import sampled

import reloadpg

PACKAGE = Path(reloadpg.__file__).parent
ENTRY_POINT = ("torch.backends", "reloadpg", "_reloadpg_activation:activate")
VARIABLES = (
    "RELOADPG_AUTOINSTALL",
    "RELOADPG_BACKENDS",
    "RELOADPG_EXCLUDE",
    "RELOADPG_STRATEGY",
    "RELOADPG_TIMEOUT_S",
    "RELOADPG_GRACE_S",
    "RELOADPG_LOG_WAIT_S",
)
SEEN = """
import torch, torch.distributed as dist, sys
print(torch.ones(2).sum().item(), type(dist.new_group).__name__ == "FunctionWrapper")
"""
"""Prints that torch works, and whether its functions are patched."""


def python(folder: Path, code: str, *, first: Path | None = None, **variables: str):
    """Run code in a fresh interpreter; `first` precedes the package on its path."""
    path = [distribution(folder), *([first] if first else []), PACKAGE.parent]
    environ = {k: value for k, value in os.environ.items() if k not in (*VARIABLES, "RANK")}
    environ.update(variables, PYTHONPATH=os.pathsep.join(map(str, path)))
    script = folder / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=folder,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    return done


def _entry_point():
    """The entry point of the installed package."""
    points = importlib.metadata.distribution("reloadpg").entry_points
    [found] = [point for point in points if point.group == ENTRY_POINT[0]]
    return found


def activate():
    """Do what torch does at the end of its import."""
    _entry_point().load()()


def test_the_installed_package_has_the_entry_point_once():
    found = _entry_point()
    assert (found.group, found.name, found.value) == ENTRY_POINT


SETTINGS = """
import logging, multiprocessing, sys
from datetime import timedelta

def equal(seconds):
    import reloadpg
    try:
        reloadpg.install(
            backends={"gloo", "nccl"}, strategy="suspend", timeout=timedelta(seconds=seconds)
        )
    except reloadpg.errors.PatchConflictError:
        return False
    return True

def child(way):
    import torch
    installed = "reloadpg.lifecycle.install" in sys.modules
    print(way, installed, equal(7.5), flush=True)

if __name__ == "__main__":
    import torch.distributed as dist
    import torch.distributed.device_mesh as mesh
    import reloadpg
    print(reloadpg.is_installed(), equal(7.5), equal(8))
    print(mesh.new_group is dist.new_group, type(dist.new_group).__name__)
    logging.getLogger("reloadpg").setLevel("DEBUG")
    logging.getLogger("reloadpg").debug("a word")
    logging.basicConfig(stream=sys.stderr, format="theirs %(message)s")
    logging.getLogger("reloadpg").debug("another")
    for way in ("fork", "spawn"):
        process = multiprocessing.get_context(way).Process(target=child, args=(way,))
        process.start()
        process.join()
        assert process.exitcode == 0
"""


@pytest.mark.slow
@pytest.mark.matrix
def test_import_torch_installs_with_the_options_of_the_variables(tmp_path):
    """They also apply in forked and spawned children.

    The logger prints until the program configures logging.
    """
    done = python(
        tmp_path,
        SETTINGS,
        RELOADPG_AUTOINSTALL="on",
        RELOADPG_BACKENDS="gloo, nccl",
        RELOADPG_STRATEGY="suspend",
        RELOADPG_TIMEOUT_S="7.5",
    )
    assert done.stdout.splitlines() == [
        "True True False",
        "True FunctionWrapper",
        "fork True True",
        "spawn True True",
    ]
    assert done.stderr.splitlines() == ["DEBUG reloadpg [rank -]: a word", "theirs another"]


def test_without_the_variable_nothing_is_imported(tmp_path):
    """``import torch`` imports only the module of the entry point."""
    ours = "[m for m in sys.modules if m.split('.')[0] in ('reloadpg', 'wrapt')]"
    done = python(tmp_path, SEEN + f"print({ours})", RELOADPG_BACKENDS="gloo")
    assert done.stdout == "2.0 False\n[]\n"
    assert done.stderr == ""


FIRST = {
    "package": "from reloadpg import offload",
    "submodule": "import reloadpg.environment.bringup",
    "install": "import logging\nimport reloadpg\nreloadpg.install(backends='gloo')",
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", sampled(FIRST, "submodule"))
def test_reloadpg_may_be_imported_before_torch(tmp_path, kind):
    """A module of reloadpg that imports torch is incomplete at the end of ``import torch``.

    The installation waits until it is imported, and then removes its import hook.
    """
    code = f"{FIRST[kind]}\n{SEEN}import reloadpg\nprint(reloadpg.is_installed(), type(reloadpg))"
    done = python(tmp_path, code, RELOADPG_AUTOINSTALL="TRUE", RELOADPG_BACKENDS="gloo")
    assert done.stdout == "2.0 True\nTrue <class 'module'>\n"
    assert done.stderr == ""


BROKEN = {
    "missing": ("wrapt.py", "raise ImportError('wrapt is\\nbroken')", "ImportError: wrapt is"),
    "exiting": ("wrapt.py", "raise SystemExit(3)", "SystemExit: 3"),
    "our own": ("reloadpg/groups/patches.py", "def (", "SyntaxError: "),
    "all of ours": ("reloadpg/__init__.py", "def (", "SyntaxError: "),
    "another": ("reloadpg.py", "", "ModuleNotFoundError: "),
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", sampled(BROKEN, "our own"))
def test_a_broken_installation_does_not_break_torch(tmp_path, kind):
    """One line reports the error; torch works and is not patched."""
    file, text, said = BROKEN[kind]
    first = tmp_path / "first"
    first.mkdir()
    if file.startswith("reloadpg/"):
        shutil.copytree(PACKAGE, first / "reloadpg", ignore=shutil.ignore_patterns("*.pyc"))
    (first / file).write_text(text)
    done = python(tmp_path, SEEN, first=first, RELOADPG_AUTOINSTALL="yes")
    assert done.stdout == "2.0 False\n"
    [line] = done.stderr.splitlines()
    assert line.startswith(f"reloadpg: not installed (RELOADPG_AUTOINSTALL='yes'): {said}")


@pytest.fixture
def environment(monkeypatch):
    """The environment of this process, without the variables."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    reloadpg.uninstall()  # after a test that has failed


INVALID = [
    ("RELOADPG_STRATEGY", "hope", "Use recreate or suspend, or unset it."),
    *(("RELOADPG_TIMEOUT_S", value, "is not a time") for value in ("5 m", "0", "nan", "inf")),
    ("RELOADPG_GRACE_S", "-1", "is not a time between one millisecond and 365 days"),
    ("RELOADPG_LOG_WAIT_S", "soon", "is not a time between one millisecond and 365 days"),
    ("RELOADPG_BACKENDS", "gloo,,nccl", "Use names separated by single commas, or unset it."),
    ("RELOADPG_EXCLUDE", "SERVICE,,", "has an empty name"),
    ("RELOADPG_BACKEND", "5", "(did you mean RELOADPG_BACKENDS?), which reloadpg does not know"),
    ("RELOADPG_TIMEOUT", "5", "(did you mean RELOADPG_TIMEOUT_S?), which reloadpg does not know"),
]
SWITCH = ("RELOADPG_AUTOINSTALL", "ture", "is neither 1, true, yes, on nor 0, false, no, off")


@pytest.mark.parametrize(("name", "value", "said"), [SWITCH, *INVALID])
def test_an_invalid_variable_prints_one_line_and_installs_nothing(
    environment, capfd, name, value, said
):
    """The line names the variable and the reason."""
    environment.setenv("RELOADPG_AUTOINSTALL", "1")
    environment.setenv(name, value)
    activate()
    out, err = capfd.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert name in line
    assert said in line
    assert line.endswith("or unset RELOADPG_AUTOINSTALL.")
    assert not reloadpg.is_installed()


@pytest.mark.parametrize(("name", "value", "said"), INVALID)
def test_install_refuses_an_invalid_variable(environment, name, value, said):
    environment.setenv(name, value)
    with pytest.raises(reloadpg.errors.InvalidOptionError, match=f"{name}.*{re.escape(said)}"):
        reloadpg.install()
    assert not reloadpg.is_installed()


@pytest.mark.matrix
def test_a_misspelt_switch_prints_a_line(environment, capfd):
    environment.setenv("RELOADPG_AUTO_INSTALL", "1")
    activate()
    [line] = capfd.readouterr().err.splitlines()
    assert "RELOADPG_AUTO_INSTALL (did you mean RELOADPG_AUTOINSTALL?)" in line
    assert not reloadpg.is_installed()


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("arguments", "variables", "options"),
    [
        ({}, ("", "", "", ""), ("recreate", 300, "accelerators", [])),
        ({}, ("suspend", "7", "gloo", "TP, *_GLOO"), ("suspend", 7, ["gloo"], ["TP", "*_GLOO"])),
        (
            {"strategy": "recreate", "timeout": 9, "backends": {"gloo"}, "exclude": "PP"},
            ("suspend", "7", "nccl", "TP"),
            ("recreate", 9, ["gloo"], ["PP"]),
        ),
    ],
)
def test_install_reads_the_variables(arguments, variables, options):
    """An argument overrides its variable. Another call may repeat them, and not change them."""
    names = ("STRATEGY", "TIMEOUT_S", "BACKENDS", "EXCLUDE")
    os.environ |= {f"RELOADPG_{n}": v for n, v in zip(names, variables, strict=True) if v}
    reloadpg.install(**arguments)
    found = reloadpg.status().options
    assert (
        tuple(found[name] for name in ("strategy", "timeout_s", "backends", "exclude")) == options
    )
    reloadpg.install(**arguments)
    with pytest.raises(reloadpg.errors.PatchConflictError, match=r"timeout_s=11.0 \(in place: "):
        reloadpg.install(timeout=11)


LATER = """
import warnings
import torch.distributed as dist
import reloadpg
from reloadpg.testing import simulated
print(reloadpg.status().options["backends"])
if {known}:
    simulated.register()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        dist.init_process_group({backend!r}, store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
print([str(one.message) for one in caught])
"""


@pytest.mark.slow
def test_a_backend_may_be_registered_after_the_installation(tmp_path):
    """There is one warning if it is still unknown when the first group is created."""
    code = LATER.format(known=True, backend="sim")
    done = python(tmp_path, code, RELOADPG_AUTOINSTALL="1", RELOADPG_BACKENDS="sim")
    assert (done.stdout, done.stderr) == ("['sim']\n[]\n", "")
    (tmp_path / "unknown").mkdir()
    code = LATER.format(known=False, backend="gloo")
    done = python(tmp_path / "unknown", code, RELOADPG_AUTOINSTALL="1", RELOADPG_BACKENDS="glo")
    options, *_, said = done.stdout.splitlines()  # gloo of torch 2.8 prints there, too
    assert options == "['glo']"
    assert said.count("RELOADPG_BACKENDS names glo (did you mean gloo?), which torch") == 1


@pytest.mark.parametrize("value", [None, "", " ", "0", "false", "No", "OFF"])
def test_false_values_install_nothing_and_print_nothing(environment, capfd, value):
    if value is not None:
        environment.setenv("RELOADPG_AUTOINSTALL", value)
    environment.setenv("RELOADPG_TIMEOUT_S", "not read")
    activate()
    assert capfd.readouterr() == ("", "")
    assert not reloadpg.is_installed()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_the_defaults_are_those_of_install(value):
    """Each true value installs. A second activation changes nothing."""
    os.environ |= {"RELOADPG_AUTOINSTALL": value, "RELOADPG_STRATEGY": ""}
    activate()
    assert reloadpg.is_installed()
    wrapper = dist.new_group
    activate()
    assert dist.new_group is wrapper
    reloadpg.install()  # other options would be refused


def test_ctrl_c_during_import_torch_ends_the_program(environment):
    environment.setenv("RELOADPG_AUTOINSTALL", "1")
    environment.setattr(reloadpg, "install", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        activate()
