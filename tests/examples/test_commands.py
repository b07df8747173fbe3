"""The gate runs the two commands of the README."""

from __future__ import annotations

import re
import subprocess

from documents import ROOT, readme_commands

GATE = (ROOT / ".ci" / "run").read_text()


def gate_commands() -> dict[str, str]:
    """By variable of the gate, the command that its own function takes from the README."""
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
    """The tests and the demo, from a clone, in a new environment, with the tested versions. Word
    for word, each in a separate step.
    """
    commands, listed = gate_commands(), readme_commands()
    assert sorted(commands.values()) == sorted(listed)
    for variable in commands:
        assert re.search(rf'^step \d+ ".*" bash -c "\${variable}"$', GATE, re.MULTILINE), variable
    for command in listed:
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -c tests/")
    endings = sorted(command.rpartition(" && ")[2] for command in listed)
    assert endings == [".venv/bin/python -m pytest", ".venv/bin/python -m reloadpg demo"]
