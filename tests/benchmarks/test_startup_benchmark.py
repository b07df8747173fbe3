"""benchmarks/startup.py runs, says what it measured, and fails where a limit is exceeded.

Timing is not tested here: the figures of a quick run mean nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{BENCHMARKS}"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=280
    )


def test_startup_measures_what_it_says(tmp_path: Path) -> None:
    """Torch is not loaded by the import; 3,000 modules are, and the early alias is found."""
    done = run(str(BENCHMARKS / "startup.py"), "--quick", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["facts"]["import_loads_torch"] is False
    assert figures["facts"]["alias_found"] is True
    assert 3000 <= figures["facts"]["modules"] < 3100
    assert [row["what"] for row in figures["rows"]] == ["import", "install", "load"]
    assert all(row["wall_ms"] > 0 and row["cpu_ms"] > 0 for row in figures["rows"])


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ("", True),
        ("imports[0]['torch'] = True", False),
        ("installs[0]['alias_found'] = False", False),
        ("rows[0]['cpu_ms'] = 50.5", False),
        ("rows[1]['cpu_ms'] = 20.5", False),
        ("rows[2]['cpu_ms'] = 500.0", True),
    ],
)
def test_each_limit_counts(change: str, ok: bool) -> None:
    """One figure over its limit, or one fact that does not hold, makes the result bad."""
    code = f"""
import startup
imports = [{{"import": (1, 49), "torch": False}}]
installs = [{{"install": (1, 19), "load": (1, 90), "alias_found": True, "modules": 1, "names": 1}}]
rows = startup.rows_of(imports, ["import"]) + startup.rows_of(installs, ["install", "load"])
{change}
print(startup.check_limits(rows, imports, installs)["ok"])
"""
    done = run("-c", code)
    assert done.stdout == f"{ok}\n", done.stderr
