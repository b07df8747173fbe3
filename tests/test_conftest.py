"""The lists that ``conftest.py`` keeps by hand: each entry is a file or a test that exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> Any:
    """The module ``conftest`` of this folder."""
    return request.config.pluginmanager.get_plugin(str(ROOT / "conftest.py"))


def test_files_exist(settings: Any) -> None:
    """Those that begin a run, that run in one world alone, and whose asserts are rewritten."""
    names = [*settings.LONGEST, *settings.ONE_WORLD, *settings.REWRITTEN]
    files = [f"{name.replace('.', '/')}.py" for name in names]
    assert [file for file in files if not any(ROOT.rglob(file))] == []


def test_left_out_tests_exist(settings: Any) -> None:
    """By the start of their names, with the name of a case in brackets."""
    wrong = []
    for name in settings.NOT_ON_NCCL:
        file, _, test = name.partition("::")
        start, _, case = test.partition("[")
        text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
        ends = r"\b" if case else ""
        if not re.search(rf"\bdef {re.escape(start)}{ends}" if start else ".", text):
            wrong.append(name)
    assert wrong == []
