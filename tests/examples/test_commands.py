"""The README's two commands are those that the gate runs."""

from __future__ import annotations

import re
import subprocess

from documents import ROOT, readme_commands

GATE = (ROOT / ".ci" / "run").read_text()


def gate_commands() -> dict[str, str]:
    """What the gate takes from the README, by the variable that holds it: by its own function."""
    (function,) = re.findall(r"^readme_command\(\) \{.*?^\}$", GATE, re.MULTILINE | re.DOTALL)
    calls = re.findall(r'^(\w+)=\$\((readme_command "[^"]+")\)$', GATE, re.MULTILINE)
    found = {}
    for variable, call in calls:
        done = subprocess.run(
            ["bash", "-c", f"{function}\n{call}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=280,
            check=True,
        )
        found[variable] = done.stdout.strip()
    return found


def test_the_gate_runs_the_readmes_commands() -> None:
    """Word for word, both of them, each in a step of its own."""
    commands = gate_commands()
    assert sorted(commands.values()) == sorted(readme_commands())
    assert len(commands) == 2
    for variable in commands:
        assert re.search(rf'^step \d+ ".*" bash -c "\${variable}"$', GATE, re.MULTILINE), variable


def test_they_are_the_tests_and_the_demo() -> None:
    """From a clone, in an environment of their own, with the versions that are tested."""
    for command in readme_commands():
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -c tests/")
    endings = sorted(command.rpartition(" && ")[2] for command in readme_commands())
    assert endings == [".venv/bin/python -m pytest", ".venv/bin/python -m reloadpg demo"]
