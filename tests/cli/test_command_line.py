"""The command line as a whole."""

import subprocess
import sys

import pytest
from cli_process import LIMIT, environment
from rank_files import write_rank

from reloadpg.__main__ import main

COMMANDS = ("demo", "doctor", "status", "explain", "bench")


def test_help_lists_all_commands_and_imports_no_torch():
    """It answers at once."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['wrapt'] = sys.modules['rich'] = None\n"
        "from reloadpg.cli import main; main(['--help'])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert all(f"    {command} " in process.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_its_help(command, capsys):
    """Exit code 0."""
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert command in capsys.readouterr().out


def test_ctrl_c_is_exit_code_130(monkeypatch, capsys):
    """One line, no traceback."""

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
    sys.stdin.read()  # until nobody reads any more
    sys.stdout.write("two\\n")
    return 0

def add(subcommands):
    subcommands.add_parser("write").set_defaults(run=run)

cli.SUBCOMMANDS = (add,)
sys.exit(cli.main(["write"]))
"""


@pytest.mark.parametrize(
    "arguments",
    [["-m", "reloadpg", "status", ".", "--watch", "--interval", "0.01"], ["-c", PENDING]],
    ids=["watch", "last line"],
)
def test_a_reader_that_leaves_is_exit_code_141(tmp_path, arguments):
    """As for ``head``: no traceback, and nothing that the interpreter adds at its end."""
    write_rank(tmp_path, 0, 1)
    process = subprocess.Popen(
        [sys.executable, *arguments],
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
        (["bench", "--groups", "0"], "argument --groups: 0 is less than 1"),
        (["explain", "x.py"], "arguments are required: --world-size"),
        (["explain", "x.py", "--world-size", "2", "--rank", "-1"], "-1 is less than 0"),
        (["explain", "x.py", "--world-size", "2", "--timeout", "0"], "is not between 0 and"),
        (["explain", "x.py", "--world-size", "2", "--timeout", "nan"], "is not between 0 and"),
        (["doctor", "no_such_file.py"], "there is no file 'no_such_file.py'"),
        (["status", "--interval", "x"], "'x' is not a number of seconds"),
        (["bench", "--", "more"], "unrecognized arguments: -- more"),
    ],
)
def test_arguments_that_cannot_be_used_are_exit_code_2(capsys, arguments, words):
    """One error, before anything is started."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert words in capsys.readouterr().err
