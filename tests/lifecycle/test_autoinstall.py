"""RELOADPG_AUTOINSTALL: what ``import torch`` then does, and that it never fails by it.

Each interpreter here gets the entry point from a distribution of its own on the path, so that
nothing depends on how the package is installed; one test looks at the installed metadata.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from sampling import sampled

import reloadpg
from reloadpg.lifecycle import autoinstall
from reloadpg.testing import run_ranks

PACKAGE = Path(reloadpg.__file__).parent
ENTRY_POINT = ("torch.backends", "reloadpg", "_reloadpg_activation:activate")
VARIABLES = (
    "RELOADPG_AUTOINSTALL",
    "RELOADPG_BACKENDS",
    "RELOADPG_EXCLUDE",
    "RELOADPG_STRATEGY",
    "RELOADPG_TIMEOUT_S",
    "RELOADPG_LOG_LEVEL",
)
SEEN = """
import torch, torch.distributed as dist, sys
print(torch.ones(2).sum().item(), type(dist.new_group).__name__ == "FunctionWrapper")
"""
"""Torch works; whether its functions are patched."""


def distribution(folder: Path) -> Path:
    """Metadata that only names the entry point; it hides the installed reloadpg's."""
    info = folder / "reloadpg-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: reloadpg\nVersion: 0\n")
    group, name, value = ENTRY_POINT
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    return folder


def python(folder: Path, code: str, *, first: Path | None = None, **variables: str):
    """A fresh interpreter; what lies in `first` comes before the package."""
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


def test_the_installed_package_names_the_entry_point():
    """Torch finds it by the metadata of the distribution, once."""
    group, name, value = ENTRY_POINT
    found = [
        point
        for point in importlib.metadata.distribution("reloadpg").entry_points
        if point.group == group
    ]
    assert [(point.name, point.value) for point in found] == [(name, value)]
    found[0].load()


SETTINGS = """
import logging, multiprocessing, sys
from datetime import timedelta

def equal(seconds):
    import reloadpg
    try:
        reloadpg.install(
            backends={"gloo", "nccl"}, strategy="suspend", timeout=timedelta(seconds=seconds)
        )
    except reloadpg.PatchConflictError:
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
    logging.getLogger("reloadpg").debug("a word")
    logging.basicConfig(stream=sys.stderr, format="theirs %(message)s")
    logging.getLogger("reloadpg").debug("another")
    for way in ("fork", "spawn"):
        process = multiprocessing.get_context(way).Process(target=child, args=(way,))
        process.start()
        process.join()
        assert process.exitcode == 0
"""


@pytest.mark.matrix
def test_import_torch_installs_as_the_variables_say(tmp_path):
    """Backends, strategy, bound and log level; every name is patched; children have it too,
    whether forked or spawned; the logger speaks until the program sets up logging itself."""
    done = python(
        tmp_path,
        SETTINGS,
        RELOADPG_AUTOINSTALL="on",
        RELOADPG_BACKENDS="gloo, nccl",
        RELOADPG_STRATEGY="suspend",
        RELOADPG_TIMEOUT_S="7.5",
        RELOADPG_LOG_LEVEL="debug",
    )
    assert done.stdout.splitlines() == [
        "True True False",
        "True FunctionWrapper",
        "fork True True",
        "spawn True True",
    ]
    assert done.stderr.splitlines() == ["DEBUG reloadpg [rank -]: a word", "theirs another"]


def test_without_the_variable_nothing_is_imported(tmp_path):
    """Then ``import torch`` costs the entry point's own module and nothing else of ours."""
    ours = "[m for m in sys.modules if m.split('.')[0] in ('reloadpg', 'wrapt')]"
    done = python(tmp_path, SEEN + f"print({ours})", RELOADPG_BACKENDS="gloo")
    assert done.stdout == "2.0 False\n[]\n"
    assert done.stderr == ""


@pytest.mark.slow
def test_torch_can_be_told_to_load_no_extensions(tmp_path):
    """TORCH_DEVICE_BACKEND_AUTOLOAD=0 is torch's own switch for all entry points."""
    done = python(tmp_path, SEEN, RELOADPG_AUTOINSTALL="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.stdout, done.stderr) == ("2.0 False\n", "")


FIRST = {
    "package": "from reloadpg import offload",
    "submodule": "import reloadpg.environment.bringup",
    "install": "import logging\nimport reloadpg\nreloadpg.install(backends='gloo')",
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", sampled(FIRST, "submodule"))
def test_reloadpg_may_be_imported_before_torch(tmp_path, kind):
    """A module of reloadpg that imports torch is not complete at the end of ``import torch``; the
    installation waits for it, and nothing of that waiting is left. An ``install`` in the program
    with the same options is then the no-op that it always is."""
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


@pytest.mark.matrix
@pytest.mark.parametrize("kind", sampled(BROKEN, "our own"))
def test_torch_can_be_imported_whatever_is_broken(tmp_path, kind):
    """wrapt that cannot be imported, that ends the process, a broken module of reloadpg: one line
    says what it is, torch works and is not patched."""
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


@pytest.mark.slow
def test_torch_can_be_imported_where_nothing_can_be_said(tmp_path):
    """A process without stderr and a bad value: no line, no exception."""
    code = "import sys; sys.stderr = None\n" + SEEN
    done = python(tmp_path, code, RELOADPG_AUTOINSTALL="1", RELOADPG_STRATEGY="hope")
    assert (done.stdout, done.stderr) == ("2.0 False\n", "")


@pytest.fixture
def environment(monkeypatch):
    """This process's environment, without the variables."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    reloadpg.uninstall()  # where a test has failed


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RELOADPG_AUTOINSTALL", "ture", "is neither 1, true, yes, on nor 0, false, no, off"),
        ("RELOADPG_BACKENDS", "gloo,,nccl", "has an empty name"),
        ("RELOADPG_EXCLUDE", "SERVICE,,", "has an empty name"),
        ("RELOADPG_STRATEGY", "hope", "hope"),
        ("RELOADPG_TIMEOUT_S", "5 minutes", "is not a positive number of seconds"),
        ("RELOADPG_TIMEOUT_S", "0", "is not a positive number of seconds"),
        ("RELOADPG_TIMEOUT_S", "nan", "is not a positive number of seconds"),
        ("RELOADPG_TIMEOUT_S", "inf", "is not a positive number of seconds"),
        ("RELOADPG_LOG_LEVEL", "loud", "is not a level of logging"),
    ],
)
def test_a_bad_value_is_one_line_and_no_installation(environment, capfd, name, value, said):
    """The line has the variable, its value and what is wrong with it."""
    environment.setenv("RELOADPG_AUTOINSTALL", "1")
    environment.setenv(name, value)
    autoinstall.activate()
    out, err = capfd.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert f"{name}={value!r}" in line
    assert said in line
    assert line.endswith("or unset RELOADPG_AUTOINSTALL.")
    assert not reloadpg.is_installed()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("RELOADPG_BACKEND", "RELOADPG_BACKENDS"),
        ("RELOADPG_TIMEOUT", "RELOADPG_TIMEOUT_S"),
    ],
)
def test_an_unknown_variable_is_one_line_and_no_installation(environment, capfd, name, meant):
    """The line has the variable that it may be meant to be."""
    environment.setenv("RELOADPG_AUTOINSTALL", "1")
    environment.setenv(name, "5")
    autoinstall.activate()
    [line] = capfd.readouterr().err.splitlines()
    assert f"{name} (did you mean {meant}?), which reloadpg does not know" in line
    assert not reloadpg.is_installed()


@pytest.mark.matrix
def test_a_misspelt_switch_is_not_silent(tmp_path):
    """With any other name nothing of ours would be imported, and nothing said."""
    done = python(tmp_path, SEEN, RELOADPG_AUTO_INSTALL="1")
    assert done.stdout == "2.0 False\n"
    [line] = done.stderr.splitlines()
    assert "RELOADPG_AUTO_INSTALL (did you mean RELOADPG_AUTOINSTALL?)" in line


BARE = """
import reloadpg
handle = reloadpg.install()
print(repr(handle))
handle.uninstall()
print(reloadpg.is_installed())
try:
    reloadpg.install(min_size=3)
except reloadpg.PatchConflictError as error:
    print(error)
reloadpg.uninstall()
print(reloadpg.install().options.strategy.name)
try:
    reloadpg.install(strategy="recreate")
except reloadpg.PatchConflictError as error:
    print(error)
"""


def test_a_bare_install_is_the_installation_of_the_environment(tmp_path):
    """With the environment's options, which the program need not repeat. Other options are refused,
    and the message says who was first."""
    done = python(
        tmp_path,
        BARE,
        RELOADPG_AUTOINSTALL="1",
        RELOADPG_STRATEGY="suspend",
        RELOADPG_EXCLUDE="SERVICE, *_GLOO",
    )
    first, installed, conflict, after, last = done.stdout.splitlines()
    assert first.startswith("<Installation backends='accelerators', min_size=2")
    assert "strategy='suspend'" in first
    assert "exclude=['SERVICE', '*_GLOO']" in first
    assert first.endswith("uninstalled by the first handle>")
    assert installed == "True"  # the handle of the second install owns nothing
    assert "In place: RELOADPG_AUTOINSTALL installed at import torch" in conflict
    assert "min_size=3 (in place: 2)" in conflict
    assert after == "suspend"  # an install of the program reads the same variables
    assert "strategy='recreate' (in place: 'suspend')" in last
    assert "RELOADPG_AUTOINSTALL" not in last


PLAIN = """
import reloadpg
try:
    options = reloadpg.install({arguments}).options
    names = options.selection.backends
    print(options.strategy, options.timeout.total_seconds(), sorted(names) if names else None)
except reloadpg.InvalidOptionError as error:
    print(error)
import logging
logging.getLogger("reloadpg.part").debug("a detail")
logging.getLogger("reloadpg").warning("waiting for 10 s; missing: rank 1")
"""
WARNING = "WARNING reloadpg [rank 3]: waiting for 10 s; missing: rank 1"


@pytest.mark.parametrize(
    ("arguments", "variables", "said", "logged"),
    [
        ("", {}, "recreate 300.0 None", [WARNING]),
        (
            "",
            {
                "RELOADPG_STRATEGY": "suspend",
                "RELOADPG_TIMEOUT_S": "7",
                "RELOADPG_BACKENDS": "gloo",
                "RELOADPG_LOG_LEVEL": "debug",
            },
            "suspend 7.0 ['gloo']",
            ["DEBUG reloadpg.part [rank 3]: a detail", WARNING],
        ),
        (
            "strategy='recreate', timeout=9, backends={'gloo'}",
            {
                "RELOADPG_STRATEGY": "suspend",
                "RELOADPG_TIMEOUT_S": "7",
                "RELOADPG_BACKENDS": "nccl",
                "RELOADPG_LOG_LEVEL": "error",
            },
            "recreate 9.0 ['gloo']",
            [],
        ),
        ("", {"RELOADPG_STRATEGY": "x"}, "RELOADPG_STRATEGY='x' is unknown.", None),
        ("", {"RELOADPG_TIMEOUT_S": "-1"}, "RELOADPG_TIMEOUT_S='-1' is not a positive", None),
        ("", {"RELOADPG_LOG_LEVEL": "loud"}, "RELOADPG_LOG_LEVEL='loud' is not a level", None),
        ("", {"RELOADPG_BACKENDS": "gloo,,nccl"}, "RELOADPG_BACKENDS='gloo,,nccl' has an", None),
    ],
)
def test_an_install_of_the_program_reads_the_variables(
    tmp_path, arguments, variables, said, logged
):
    """An argument wins; a value that cannot be used is refused by name. Warnings are printed."""
    script = PLAIN.format(arguments=arguments)
    done = python(tmp_path, script, RELOADPG_AUTOINSTALL="0", RANK="3", **variables)
    assert done.stdout.startswith(said), done.stdout + done.stderr
    if logged is not None:
        lines = [line for line in done.stderr.splitlines() if "reloadpg" in line]
        assert [line for line in lines if "detail" in line or "missing" in line] == logged


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
def test_a_backend_that_is_registered_later_may_be_named(tmp_path):
    """It counts from then on; one still unknown when there are groups is warned of, once."""
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
def test_off_is_off(environment, capfd, value):
    """Unset, empty and every word for no: nothing happens and nothing is said."""
    if value is not None:
        environment.setenv("RELOADPG_AUTOINSTALL", value)
    environment.setenv("RELOADPG_TIMEOUT_S", "not read")
    autoinstall.activate()
    assert capfd.readouterr() == ("", "")
    assert not reloadpg.is_installed()


def _activated(rank, world_size):
    seen = []
    for value in ("1", "true", "YES", "on"):
        os.environ["RELOADPG_AUTOINSTALL"] = value
        os.environ["RELOADPG_STRATEGY"] = ""
        autoinstall.activate()
        wrapper = dist.new_group
        autoinstall.activate()
        seen.append((reloadpg.is_installed(), dist.new_group is wrapper))
        reloadpg.install()  # another installation than this one would be refused
        reloadpg.uninstall()
    return seen


def test_defaults_are_those_of_install():
    """With the switch alone, by each word for yes; a second activation changes nothing."""
    assert run_ranks(_activated, 1) == [[(True, True)] * 4]


def test_an_interrupt_is_not_swallowed(environment):
    """Ctrl-C during ``import torch`` still ends the program."""
    environment.setattr(autoinstall, "_activate", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        autoinstall.activate()
