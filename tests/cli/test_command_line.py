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
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"reloadpg {reloadpg.__version__}\n"


@pytest.mark.parametrize(
    ("missing", "arguments", "words"),
    [
        ("torch", ["demo"], "pip install 'torch'"),
        ("numpy", ["demo"], "pip install 'reloadpg[demo]'"),
        ("wrapt", ["explain", __file__, "--world-size", "2"], "pip install 'wrapt'"),
    ],
)
def test_a_missing_module_is_one_line_with_what_to_install(missing, arguments, words):
    """Exit code 2; nothing is started."""
    process = without(missing, arguments=arguments)
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert f": {missing} cannot be imported (ModuleNotFoundError: " in line
    assert "nothing was started" in line
    assert line.endswith(words)


@pytest.mark.parametrize("command", ["demo", "status"])
def test_every_command_refuses_an_unknown_variable(monkeypatch, capsys, command):
    """Exit code 2 and one line. ``doctor`` reports it among its findings."""
    monkeypatch.setenv("RELOADPG_STATUS", "/tmp")
    assert main([command]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "RELOADPG_STATUS (did you mean RELOADPG_STATUS_DIR?)" in line
    assert "nothing was started" in line


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


PENDING = """
import sys
from reloadpg import cli

def run(options):
    sys.stdout.write("one\\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the pipe is closed
    sys.stdout.write("two\\n")
    return 0

def add(subcommands):
    subcommands.add_parser("write").set_defaults(run=run)

cli.SUBCOMMANDS = (add,)
sys.exit(cli.main(["write"]))
"""


def test_a_closed_pipe_is_exit_code_141(tmp_path):
    """As for ``head``: without a traceback or a message of the interpreter."""
    process = subprocess.Popen(
        [sys.executable, "-c", PENDING],
        env=environment(PYTHONUNBUFFERED=""),
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline()
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=LIMIT) == 141
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--cycles", "0"], "argument --cycles: 0 is less than 1"),
        (["demo", "--ranks", "two"], "argument --ranks: 'two' is not a whole number"),
        (["explain", "x.py", "--world-size", "2", "--rank", "-1"], "-1 is less than 0"),
        (["explain", "x.py", "--world-size", "2", "--timeout", "nan"], "is not between 0 and"),
        (["doctor", "no_such_file.py"], "there is no file 'no_such_file.py'"),
        (["explain", "x.py", "--world-size", "2", "--timeout", "x"], "not a number of seconds"),
        (["status", "--", "more"], "unrecognized arguments: -- more"),
        (
            ["explain", "x.py", "--world-size", "2", "--tp", "8"],
            "unrecognized arguments: --tp 8; arguments of the script follow --, as in: -- --tp 8",
        ),
        ([], "arguments are required: COMMAND"),
    ],
)
def test_invalid_arguments_are_exit_code_2(capsys, arguments, words):
    """With one error, before anything is started."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert words in capsys.readouterr().err
