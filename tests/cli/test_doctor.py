"""``doctor`` reports what prevents offload and reload."""

import functools
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cli.cli_process import called, command

import reloadpg
from reloadpg.cli import doctor, main
from reloadpg.cli.doctor import Finding, diagnose
from reloadpg.lifecycle.installation import installation

FOREIGN = """
import functools
import torch.distributed as dist

def another_library(function):
    @functools.wraps(function)
    def wrapper_of_another(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper_of_another

dist.new_group = another_library(dist.new_group)
"""


FINDING = re.compile(r"  \[(\w+)\] +(\S+(?: \S+)*)  +(.*)")


def of(found, check, level=None):
    """The messages of one check, in the findings or on the page of the command."""
    if isinstance(found, str):
        shown = [one.groups() for one in map(FINDING.fullmatch, found.splitlines()) if one]
        found = [Finding(name, level, message) for level, name, message in shown]
    return [one.message for one in found if one.check == check and level in (None, one.level)]


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """A directory with a module that wraps ``new_group``, one that exits, and a script."""
    directory = tmp_path_factory.mktemp("modules")
    (directory / "wraps.py").write_text(FOREIGN)
    (directory / "exits.py").write_text("raise SystemExit('no GPU here')\n")
    script = "if True:\n    import wraps\nraise RuntimeError('the script was run')\n"
    (directory / "train.py").write_text(script)
    return directory


def test_all_problems_are_reported_at_once(modules):
    """A wrapper, and an invalid variable: exit code 1.

    The script is not run, but the modules that it imports in a branch are imported.
    """
    script = modules / "train.py"
    code, found = called("doctor", script, cwd=modules, RELOADPG_TIMEOUT_S="soon")
    assert code == 1
    # Named by its code, though functools.wraps gave it torch's name and module.
    (message,) = of(found, "foreign wrapper", "problem")
    assert "torch.distributed.new_group" in message
    assert "wrapper_of_another" in message
    assert "wraps.py:6" in message
    (message,) = of(found, "variables", "problem")
    assert message.startswith("RELOADPG_TIMEOUT_S='soon'")


@pytest.mark.slow
def test_a_correct_environment_has_no_problem_and_no_warning():
    """Exit code 0. An autoinstall is reported."""
    process = command("doctor", RELOADPG_AUTOINSTALL="1")
    found = process.stdout
    assert process.returncode == 0, found
    assert found.endswith("\nNo problem was found; 0 warnings.\n")
    for check in ("torch", "device", "nccl", "nccl settings", "foreign wrapper", "launcher"):
        assert of(found, check)
    assert of(found, "autoinstall", "ok") == ["installed"]


@pytest.mark.slow
def test_a_failed_autoinstall_is_a_problem():
    """The reason is in the log."""
    process = command("doctor", RELOADPG_AUTOINSTALL="1", RELOADPG_STRATEGY="bogus")
    (message,) = of(process.stdout, "autoinstall", "problem")
    assert message == "not installed in this process (RELOADPG_AUTOINSTALL='1')"
    assert "reloadpg: not installed" in process.stderr
    assert "RELOADPG_STRATEGY='bogus' is unknown" in process.stderr
    assert not of(diagnose(environ={"RELOADPG_AUTOINSTALL": "off"}), "autoinstall")
    (message,) = of(diagnose(environ={"RELOADPG_AUTOINSTALL": "ture"}), "autoinstall", "problem")
    assert message.endswith("(RELOADPG_AUTOINSTALL='ture')")


@pytest.mark.parametrize(
    ("variable", "message", "remedy"),
    [
        ("STATUSDIR=/tmp", "did you mean RELOADPG_STATUS_DIR?", "correct the name or unset it"),
        ("FOO=1", "RELOADPG_FOO is unknown", "RELOADPG_TIMEOUT_S"),  # all are listed
        ("STRATEGY=bogus", "RELOADPG_STRATEGY='bogus' is unknown", "recreate or suspend"),
        ("TIMEOUT_S=abc", "RELOADPG_TIMEOUT_S='abc' is not a time", "a number of seconds"),
    ],
)
def test_a_variable_for_which_install_would_raise_is_a_problem(variable, message, remedy):
    name, value = variable.split("=")
    diagnosis = diagnose(environ={f"RELOADPG_{name}": value})
    (problem,) = [one for one in diagnosis if one.check == "variables"]
    assert problem.level == "problem"
    assert message in problem.message
    assert "cannot be installed" in problem.message
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("version", "level", "words"),
    [
        ("2.7.1+cu124", "problem", "version 2.7.1+cu124 is too old: 2.8 to 2.15"),
        ("2.8.0", "ok", "version 2.8.0"),
        ("2.15.3", "ok", "version 2.15.3"),
        ("2.16.0.dev20260101", "warning", "newer than 2.15"),
    ],
)
def test_torch_versions(monkeypatch, version, level, words):
    """An old version is a problem, a newer one a warning."""
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__=version))
    (finding,) = doctor.check_torch()
    assert finding.level == level
    assert words in finding.message


def test_a_module_or_script_that_cannot_be_imported_is_reported(modules, monkeypatch):
    """Also a module that exits. The other checks still run."""
    monkeypatch.syspath_prepend(str(modules))
    (modules / "broken.py").write_text("import os\nif:\n")
    broken = diagnose(modules / "broken.py")
    assert "broken.py cannot be read: invalid syntax" in of(broken, "script", "problem")[0]
    for name, text in (("job.sh", "torchrun train.py\n"), ("job", "#!/bin/sh\nexec torchrun\n")):
        (modules / name).write_text(text)
        [problem] = [one for one in diagnose(modules / name) if one.check == "script"]
        assert problem.remedy == "pass a Python script; for a shell script, the one that it starts"
    (modules / "imports.py").write_text("import exits\nimport no_such_module_anywhere\n")
    diagnosis = diagnose(modules / "imports.py")
    warnings = of(diagnosis, "script", "warning")
    assert warnings[0] == "exits cannot be imported: SystemExit: no GPU here"
    assert warnings[1].startswith("no_such_module_anywhere cannot be imported: ModuleNotFound")
    assert [one for one in diagnosis if one.check == "launcher"]


@pytest.mark.parametrize("function", doctor.CREATORS)
@pytest.mark.parametrize("home", [dist, dist.distributed_c10d])
def test_a_foreign_wrapper_is_found_at_every_name_of_a_function(monkeypatch, home, function):
    """Also a partial function."""
    monkeypatch.setattr(home, function, functools.partial(getattr(home, function)))
    (finding,) = doctor.check_wrappers()
    assert finding.level == "problem"
    assert f"{home.__name__}.{function} is wrapped by functools.partial(" in finding.message


@pytest.fixture
def installed():
    reloadpg.install(backends={"gloo"})
    yield
    reloadpg.uninstall()


def test_what_install_wraps_is_listed(installed):
    """The names at which an installation has changed something, and those of the README."""
    [listed] = [one.message for one in diagnose() if one.check == "patches"]
    names = listed.removeprefix("install() wraps ").split(", ")
    changed = {  # some modules have aliases
        patch.attribute if isinstance(patch.owner, type) else patch.original.__name__
        for patch in installation.patches.patches
    }
    assert {name.rpartition(".")[2] for name in names} == changed
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    section = readme.partition("## What `install()` changes in torch")[2].partition("\n## ")[0]
    creators = [name for name in names if "Backend" not in name and "NCCL" not in name]
    assert [name for name in creators if name.rpartition(".")[2] not in section] == []


def test_own_wrappers_are_not_foreign(installed):
    assert [one.level for one in doctor.check_wrappers()] == ["ok"]


def test_a_wrapper_over_an_own_wrapper_is_found(installed, monkeypatch):
    """The message names its code, and the name that was patched."""
    with monkeypatch.context() as patch:
        ours = dist.new_group
        patch.setattr(dist, "new_group", lambda *args: ours(*args))
        (finding,) = doctor.check_wrappers()
    assert finding.message.startswith("torch.distributed.new_group is wrapped by <lambda>")
    assert "test_doctor.py:" in finding.message


GRAPHS, HOOK = "NCCL_GRAPH_REGISTER", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
HANDLING, BLOCKING = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"


@pytest.mark.parametrize(
    ("saver", "environ", "warning", "ok"),
    [
        (False, {GRAPHS: "1"}, None, f"{GRAPHS}=1"),
        (True, {GRAPHS: "1"}, f"{GRAPHS}=1: with torch_memory_saver, graphs", None),
        (True, {GRAPHS: "1", "NCCL_DEBUG": "INFO"}, f"{GRAPHS}=1: with", "NCCL_DEBUG=INFO"),
        (True, {GRAPHS: "0", HOOK: "1"}, f"{HOOK} is set: torch keeps", f"{GRAPHS}=0"),
        (False, {HANDLING: "0"}, f"{HANDLING}=0: torch only logs", None),
        (False, {HANDLING: "0", BLOCKING: "1"}, None, f"{HANDLING}=0, {BLOCKING}=1"),
    ],
)
def test_the_settings_of_nccl_are_named(monkeypatch, saver, environ, warning, ok):
    """Each in one row. Registered graphs hang with a memory saver (failure 40)."""
    if saver:
        monkeypatch.setitem(sys.modules, "torch_memory_saver", types.ModuleType("saver"))
    found = diagnose(environ=environ)
    warnings = of(found, "nccl settings", "warning")
    assert len(warnings) == (warning is not None)
    assert all(one.startswith(warning) for one in warnings)
    assert of(found, "nccl settings", "ok") == ([] if ok is None else [ok])


def test_the_launcher_is_named_with_its_missing_variables():
    torchrun = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    (finding,) = [f for f in diagnose(environ=torchrun) if f.check == "launcher"]
    assert finding.message.startswith("torchrun: rank 1 of 2")
    del torchrun["WORLD_SIZE"]
    (finding,) = [f for f in diagnose(environ=torchrun) if f.check == "launcher"]
    assert finding.level == "problem"
    assert "WORLD_SIZE" in finding.message


@pytest.mark.parametrize(
    ("level", "code", "end"),
    [("problem", 1, "1 problem; 0 warnings."), ("warning", 0, "No problem was found; 1 warning.")],
)
def test_the_page_has_what_a_bug_report_needs(monkeypatch, capsys, level, code, end):
    """Versions, settings by their prefixes, and findings; nothing else of the environment."""
    finding = Finding("torch", level, "what was found", "what to do")
    monkeypatch.setattr("reloadpg.cli.doctor.diagnose", lambda *_, **__: [finding])
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("AWS_SECRET", "hidden")
    assert main(["doctor"]) == code
    text = capsys.readouterr().out
    assert text.startswith(f"reloadpg {reloadpg.__version__}, Python 3.")
    assert re.search(
        rf"^  \[{level}\] +torch  what was found\n +-> what to do$", text, re.MULTILINE
    )
    assert text.endswith(f"\n{end}\n")
    assert f"torch {torch.__version__.partition('+')[0]}" in text
    assert "\n  NCCL_DEBUG=INFO\n" in text
    assert "hidden" not in text


def test_a_check_that_raises_hides_no_other(monkeypatch):
    """As with a torch in which a name is missing."""

    def broken(*_):
        raise AttributeError("module 'torch' has no attribute 'distributed'")

    monkeypatch.setattr("reloadpg.cli.doctor.check_wrappers", broken)
    found = diagnose()
    assert ("foreign wrapper", "note") in [(one.check, one.level) for one in found]
    assert "launcher" in [one.check for one in found]
