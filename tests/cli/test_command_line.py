"""The command line as a whole."""

import re
import subprocess
import sys

import pytest
from cli.cli_process import LIMIT, environment
from cli.rank_files import write_rank

import reloadpg
from reloadpg.__main__ import main
from reloadpg.cli import parser


def without(*modules, arguments):
    """Run the command line where these modules cannot be imported."""
    halted = "".join(f"sys.modules[{name!r}] = " for name in modules)
    return subprocess.run(
        [
            *(sys.executable, "-c"),
            f"import sys; {halted}None\n"
            "from reloadpg.cli import main; sys.exit(main(sys.argv[1:]))",
            *arguments,
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_help_lists_all_commands_without_importing_torch(capsys):
    process = without("torch", "wrapt", arguments=["--help"])
    assert process.returncode == 0, process.stderr
    _, commands = parser()
    assert [*commands] == ["demo", "doctor", "status", "explain", "standins"]
    for command in commands:
        assert re.search(rf"^    {command}\s", process.stdout, re.MULTILINE)
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
        said = capsys.readouterr().out
        assert command in said
        assert re.search(rf"^Example: .*reloadpg {command}\b", said, re.MULTILINE), said
        assert "docs/" not in said  # an installed package has no pages
    assert main([]) == 0
    assert "usage: " in (shown := capsys.readouterr().out)
    assert all(f"\n    {command} " in shown for command in commands)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"reloadpg {reloadpg.__version__}\n"


def test_without_numpy_the_demo_says_what_to_install():
    """Exit code 2 and one line; nothing is started."""
    process = without("numpy", arguments=["demo"])
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert (
        line == "reloadpg demo: numpy is missing; nothing was started. pip install 'reloadpg[demo]'"
    )


def test_standins_run_says_that_the_package_is_not_installed():
    """From its source alone: the program's processes would have no kernels."""
    arguments = ["-S", "-m", "reloadpg", "standins", "run", "--", "true"]
    process = subprocess.run(
        [sys.executable, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert process.returncode == 2
    assert "Nothing was started. Run: pip install /" in process.stderr


def test_doctor_and_status_work_without_torch(tmp_path):
    """``doctor`` says what is missing."""
    write_rank(tmp_path, 0, 1)
    bare = ("torch", "wrapt")
    process = without(*bare, arguments=["status", str(tmp_path)])
    assert process.returncode == 0, process.stderr
    assert "1 of 1 ranks: 1 live" in process.stdout
    process = without(*bare, arguments=["doctor"])
    assert process.returncode == 1, process.stderr
    assert "[problem]  torch" in process.stdout
    assert "-> install torch 2.8 to 2.15 in this environment" in process.stdout


def test_ctrl_c_is_exit_code_130(monkeypatch, capsys):
    """With one line and no traceback."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("reloadpg.cli.doctor.diagnose", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err.splitlines()[-1].endswith(": interrupted")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--cycles", "0"], "argument --cycles: 0 is less than 1"),
        (["demo", "--ranks", "two"], "argument --ranks: 'two' is not a whole number"),
        (["doctor", "no_such_file.py"], "there is no file 'no_such_file.py'"),
        (["status", "--", "more"], "unrecognized arguments: -- more"),
        (
            ["explain", "x.py", "--world-size", "2", "--tp", "8"],
            "unrecognized arguments: --tp 8; arguments of the script follow --, as in: -- --tp 8",
        ),
    ],
)
def test_invalid_arguments_are_exit_code_2(capsys, arguments, words):
    """With one error, before anything is started."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert words in capsys.readouterr().err
