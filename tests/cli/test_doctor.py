"""``doctor`` finds what keeps offload and reload from working, and nothing else."""

import functools
import os
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cli_process import command, decoded
from rank_files import write_rank

import reloadpg
from reloadpg.cli import doctor_patches, doctor_torch, main
from reloadpg.cli.doctor import diagnose
from reloadpg.cli.findings import Diagnosis, Finding
from reloadpg.testing import run_ranks

pytestmark = pytest.mark.timeout(180)

FOREIGN = """
import functools
import torch.distributed as dist

def somebodys(function):
    @functools.wraps(function)
    def wrapper_of_somebody(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper_of_somebody

dist.new_group = somebodys(dist.new_group)
"""
ALIAS = "from torch.distributed import new_group as make_group\n"


def of(diagnosis, check, level=None):
    """The messages of one check."""
    findings = [Finding(**one) for one in diagnosis["findings"]]
    return [one.message for one in findings if one.check == check and level in (None, one.level)]


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """A directory with a module that wraps ``new_group``, one with an early alias, and a script."""
    directory = tmp_path_factory.mktemp("modules")
    (directory / "wraps.py").write_text(FOREIGN)
    (directory / "aliases.py").write_text(ALIAS)
    (directory / "exits.py").write_text("raise SystemExit('no GPU here')\n")
    script = (
        "import aliases\nif True:\n    import wraps\nraise RuntimeError('the script was run')\n"
    )
    (directory / "train.py").write_text(script)
    return directory


@pytest.fixture(scope="module")
def sick(modules, tmp_path_factory):
    """What is found where everything is wrong at once."""
    directory = tmp_path_factory.mktemp("job")
    for rank in range(3):
        write_rank(directory, rank, 3, installed=rank != 1)
    options = ["--import", "aliases", "--import", "wraps", "--status-dir", directory]
    return command("doctor", "--json", *options, cwd=modules, NCCL_CUMEM_ENABLE="0")


@pytest.fixture(scope="module")
def healthy():
    """What is found where nothing is wrong."""
    return command("doctor", "--json")


def test_nothing_is_found_where_nothing_is_wrong(healthy):
    """No problem and no warning, exit code 0."""
    found = decoded(healthy)
    assert found["ok"] is True
    assert {one["level"] for one in found["findings"]} <= {"ok", "note"}
    checks = {one["check"] for one in found["findings"]}
    assert checks >= {"torch", "nccl", "nccl settings", "suspend", "foreign wrapper", "launcher"}
    assert healthy.returncode == 0


def test_a_foreign_wrapper_over_new_group_is_found(sick):
    """It is named by its code, though ``functools.wraps`` gave it torch's name and module."""
    (message,) = of(decoded(sick), "foreign wrapper", "problem")
    assert "torch.distributed.new_group" in message
    assert "wrapper_of_somebody" in message
    assert "wraps.py, line 6" in message


def test_a_module_with_an_early_alias_is_found(sick):
    """With its name; ``install`` would patch it, so it is a warning."""
    assert of(decoded(sick), "early alias") == ["aliases.make_group is torch's own new_group"]
    assert of(decoded(sick), "early alias", "warning")


def test_nccl_cumem_enable_0_is_found(sick):
    """It makes a suspend give nothing back."""
    (message,) = of(decoded(sick), "nccl settings", "problem")
    assert message.startswith("NCCL_CUMEM_ENABLE=0 in the environment")


def test_a_job_where_one_rank_did_not_install_is_found(sick):
    """The rank is named."""
    assert of(decoded(sick), "job", "problem") == ["not installed: rank 1"]


def test_problems_give_exit_code_1(sick):
    """And the JSON says that it is not ok."""
    assert sick.returncode == 1
    assert decoded(sick)["ok"] is False


@pytest.fixture(scope="module")
def switched_on():
    """What is found with a backend that torch knows, and with one that it does not know."""
    options = {"RELOADPG_AUTOINSTALL": "1", "RELOADPG_TIMEOUT_S": "7.5"}
    return {
        backend: command("doctor", "--json", **options, RELOADPG_BACKENDS=backend)
        for backend in ("gloo", "bogus")
    }


def test_an_autoinstall_that_failed_is_a_problem(switched_on):
    """With autoinstall's own words, which it has written to stderr too."""
    (message,) = of(decoded(switched_on["bogus"]), "autoinstall", "problem")
    assert "unknown backend bogus" in message
    assert f"reloadpg: {message}" in switched_on["bogus"].stderr
    assert switched_on["bogus"].returncode == 1


def test_an_autoinstall_in_place_is_said_with_its_options(switched_on, healthy):
    """And where it is switched off, nothing is."""
    (message,) = of(decoded(switched_on["gloo"]), "autoinstall", "ok")
    assert "backends gloo" in message
    assert "strategy recreate" in message
    assert "timeout 7.5 s" in message
    assert not of(decoded(healthy), "autoinstall")


def test_an_autoinstall_that_torch_did_not_call_is_a_problem():
    """This process was not switched on, and a fresh one says nothing: torch is told not to ask."""
    variables = {**os.environ, "RELOADPG_AUTOINSTALL": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    (finding,) = [f for f in diagnose(environ=variables).findings if f.check == "autoinstall"]
    assert finding.level == "problem"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in finding.remedy


@pytest.mark.parametrize(
    ("version", "level", "words"),
    [
        ("2.6.0+cu124", "problem", "version 2.6.0+cu124 is too old: 2.8 to 2.15"),
        ("2.7.1", "problem", "too old"),
        ("2.8.0", "ok", "version 2.8.0"),
        ("2.15.3", "ok", "version 2.15.3"),
        ("2.16.0.dev20260101", "warning", "newer than 2.15"),
        ("3.0", "warning", "newer than 2.15"),
        ("unknown", "problem", "cannot be read"),
        ("", "problem", "cannot be read"),
    ],
)
def test_torch_versions(monkeypatch, version, level, words):
    """2.8 to 2.15 are supported; older and unreadable ones are problems, newer ones a warning."""
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__=version))
    (finding,) = doctor_torch.check_torch()
    assert finding.level == level
    assert words in finding.message


def test_an_unsupported_torch_is_found_by_the_command(tmp_path):
    """Exit code 1 and what to do, with a torch of which nothing but the version works."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.6.0'\n")
    process = command("doctor", path=tmp_path)
    assert process.returncode == 1, process.stderr
    assert "[problem]  torch" in process.stdout
    assert "version 2.6.0 is too old" in process.stdout
    assert "-> install torch 2.8 or later" in process.stdout
    assert "Traceback" not in process.stdout + process.stderr


def test_a_torch_that_cannot_be_imported_is_found_by_the_command(tmp_path):
    """The reason is shown."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open')\n")
    process = command("doctor", "--json", path=tmp_path)
    assert process.returncode == 1
    (message,) = of(decoded(process), "torch", "problem")
    assert "libcudart.so.13: cannot open" in message


def test_a_script_is_looked_at_but_not_run(modules):
    """What it imports at its top level, in branches too, is imported; its own code does not run."""
    process = command("doctor", modules / "train.py", "--json")
    found = decoded(process)
    assert of(found, "foreign wrapper", "problem")
    assert of(found, "early alias", "warning") == ["aliases.make_group is torch's own new_group"]
    assert process.returncode == 1


def test_names_that_the_script_itself_takes_early_are_found(tmp_path, monkeypatch):
    """With their line."""
    script = tmp_path / "own.py"
    script.write_text("import os\nfrom torch.distributed import new_group\nboom()\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    messages = [one.message for one in diagnose(script).at("warning")]
    assert "own.py, line 2: new_group is torch's own new_group" in messages


def test_a_module_that_cannot_be_imported_is_a_warning(modules, monkeypatch):
    """Also one that exits; the other checks are carried out all the same."""
    monkeypatch.syspath_prepend(str(modules))
    diagnosis = diagnose(modules=["exits", "no_such_module_anywhere"])
    warnings = [one.message for one in diagnosis.at("warning") if one.check == "import"]
    assert warnings[0] == "exits cannot be imported: SystemExit: no GPU here"
    assert warnings[1].startswith("no_such_module_anywhere cannot be imported: ModuleNotFound")
    assert [one for one in diagnosis.findings if one.check == "launcher"]


@pytest.mark.parametrize("function", doctor_patches.CREATORS)
@pytest.mark.parametrize("home", [dist, dist.distributed_c10d])
def test_a_foreign_wrapper_is_found_at_any_name_of_any_function(monkeypatch, home, function):
    """Whatever it is: here a partial function, which wraps without saying so."""
    monkeypatch.setattr(home, function, functools.partial(getattr(home, function)))
    (finding,) = doctor_patches.check_foreign_wrappers()
    assert finding.level == "problem"
    assert f"{home.__name__}.{function} is wrapped by partial" in finding.message


def test_our_own_wrapper_is_not_foreign():
    """Nor torch's own decorator below it."""
    with reloadpg.install(backends={"gloo"}):
        assert [one.level for one in doctor_patches.check_foreign_wrappers()] == ["ok"]


def test_a_wrapper_put_over_ours_is_found(monkeypatch):
    """Its code is named, and the name that we had patched."""
    with reloadpg.install(backends={"gloo"}):
        with monkeypatch.context() as patch:
            ours = dist.new_group
            patch.setattr(dist, "new_group", lambda *args: ours(*args))
            first, second = doctor_patches.check_foreign_wrappers()
        assert "test_a_wrapper_put_over_ours_is_found.<locals>.<lambda>" in first.message
        assert second.message.startswith("torch.distributed.new_group is <function")


def a_class():
    return type("Holder", (), {"make": staticmethod(dist.new_group), "__module__": "holds_early"})


def a_function():
    def with_default(make=dist.new_group):
        return make

    with_default.__module__ = "holds_early"
    return with_default


def a_closure():
    make = dist.new_group

    def closes_over():
        return make

    closes_over.__module__ = "holds_early"
    return closes_over


def place(monkeypatch, **values):
    """A loaded module with these names."""
    module = types.ModuleType("holds_early")
    vars(module).update(values)
    monkeypatch.setitem(sys.modules, "holds_early", module)


def early():
    found = doctor_patches.check_early_aliases()
    return [(one.level, one.message) for one in found if "holds_early" in one.message]


@pytest.mark.parametrize(
    ("holder", "where"),
    [
        (a_class, "holds_early.x.make"),
        (a_function, "holds_early.x() as a default"),
        (a_closure, "holds_early.x() in its closure"),
        (lambda: functools.partial(dist.new_group), "holds_early.x (a partial)"),
        (lambda: {"make": dist.new_group}, "holds_early.x['make']"),
    ],
)
def test_a_reference_that_no_patch_reaches_is_a_problem(monkeypatch, holder, where):
    """In a class, a default, a closure, a partial function, a dictionary: no ``install`` helps."""
    place(monkeypatch, x=holder())
    ((level, message),) = early()
    assert level == "problem"
    assert message.startswith(f"{where} holds torch's own new_group")


def test_an_alias_that_is_left_after_install_is_a_problem(monkeypatch):
    """A module that comes with torch's function later; one that was there before is mended."""
    original = dist.new_group
    place(monkeypatch, x=original)
    assert [level for level, _ in early()] == ["warning"]
    with reloadpg.install(backends={"gloo"}):
        assert early() == []
        place(monkeypatch, x=original)
        assert [level for level, _ in early()] == ["problem"]


def test_a_module_with_a_hostile_getattr_is_not_asked(monkeypatch):
    """As in the patching itself."""

    def refuse(name):
        raise RuntimeError(f"asked for {name}")

    place(monkeypatch, __getattr__=refuse, x=dist.new_group)
    assert len(early()) == 1


def test_cumem_is_found_in_nccls_file_too(tmp_path):
    """A variable of the environment wins over the file."""
    (tmp_path / "nccl.conf").write_text("# NCCL_DEBUG=INFO\nNCCL_CUMEM_ENABLE=0\n")
    environ = {"NCCL_CONF_FILE": str(tmp_path / "nccl.conf")}
    (problem,) = [f for f in doctor_torch.check_nccl_settings(environ) if f.level == "problem"]
    assert str(tmp_path / "nccl.conf") in problem.message
    environ["NCCL_CUMEM_ENABLE"] = "1"
    assert not [f for f in doctor_torch.check_nccl_settings(environ) if f.level == "problem"]


@pytest.mark.parametrize(
    ("version", "variables", "level", "words"),
    [
        ((2, 29, 7), {}, "ok", "NCCL 2.29.7 can suspend"),
        ((2, 28, 9), {}, "note", "NCCL 2.28.9 cannot suspend"),
        ((2, 30, 7), {"NCCL_CUMEM_ENABLE": "0"}, "note", "gives nothing back"),
        (None, {}, "note", "no NCCL"),
    ],
)
def test_suspend_support(monkeypatch, version, variables, level, words):
    """Needs torch's method and NCCL 2.29.7, and NCCL's own allocator."""
    monkeypatch.setattr(doctor_torch, "nccl_version", lambda: version)
    monkeypatch.setattr(doctor_torch, "torch_can_suspend", lambda: True)
    (finding,) = doctor_torch.check_suspend({"HOME": os.devnull, **variables})
    assert finding.level == level
    assert words in finding.message.replace("give nothing", "gives nothing")


def test_suspend_needs_torch_2_12():
    """As this torch has it, whichever it is."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert doctor_torch.torch_can_suspend() is (version >= (2, 12))


def test_the_launcher_is_named():
    """And what is wrong with its variables."""
    torchrun = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    (finding,) = [f for f in diagnose(environ=torchrun).findings if f.check == "launcher"]
    assert finding.message.startswith("torchrun: rank 1 of 2")
    del torchrun["WORLD_SIZE"]
    (finding,) = [f for f in diagnose(environ=torchrun).findings if f.check == "launcher"]
    assert finding.level == "problem"
    assert "WORLD_SIZE" in finding.message


def some_ranks_install(rank, world_size, directory):
    if rank != 1:
        reloadpg.install(backends={"gloo"})
    dist.init_process_group("gloo")
    write_rank(Path(directory), rank, world_size, status=reloadpg.status().details())
    found = diagnose()
    dist.barrier()
    dist.destroy_process_group()
    return [(one.check, one.level) for one in found.findings if one.level == "problem"]


def test_a_real_job_where_one_rank_did_not_install(tmp_path):
    """Its own status says so, and ``diagnose`` in the ranks finds nothing wrong with the others."""
    assert run_ranks(some_ranks_install, 2, args=(str(tmp_path),), timeout=90) == [[], []]
    problems = [f for f in diagnose(status_dir=tmp_path).at("problem") if f.check == "job"]
    assert [one.message for one in problems] == ["not installed: rank 1"]


def test_a_rank_without_a_file_is_found(tmp_path):
    """By the world size that the others know."""
    write_rank(tmp_path, 0, 3)
    write_rank(tmp_path, 2, 3)
    problems = [f for f in diagnose(status_dir=tmp_path).at("problem") if f.check == "job"]
    assert [one.message for one in problems] == ["missing: rank 1 of a job of 3 said nothing"]


def test_an_empty_status_directory_is_a_problem(tmp_path):
    """It says what to set."""
    (problem,) = [f for f in diagnose(status_dir=tmp_path).at("problem") if f.check == "job"]
    assert "RELOADPG_STATUS_DIR" in problem.remedy


@pytest.mark.parametrize(
    ("level", "options", "code"),
    [("problem", [], 1), ("warning", [], 0), ("warning", ["--strict"], 1), ("note", [], 0)],
)
def test_exit_codes(monkeypatch, capsys, level, options, code):
    """A problem is 1; a warning is 1 with --strict."""
    finding = Finding("torch", level, "what was found", "what to do")
    monkeypatch.setattr("reloadpg.cli.doctor.diagnose", lambda *_, **__: Diagnosis([finding]))
    assert main(["doctor", *options]) == code
    assert f"[{level}]" in capsys.readouterr().out


def test_a_check_that_fails_hides_no_other(monkeypatch):
    """A torch in which something is missing still gets its diagnosis."""

    def broken(*_):
        raise AttributeError("module 'torch' has no attribute 'distributed'")

    monkeypatch.setattr("reloadpg.cli.doctor.check_foreign_wrappers", broken)
    found = diagnose().findings
    assert ("foreign wrapper", "note") in [(one.check, one.level) for one in found]
    assert "launcher" in [one.check for one in found]
