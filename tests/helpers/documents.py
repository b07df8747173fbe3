"""Extracts the code blocks of the documents."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
ENVIRONMENT = ROOT / "reloadpg" / "environment" / "__init__.py"


@dataclass(frozen=True)
class Block:
    """One example: its document, its first line, and its code."""

    document: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def readme_blocks() -> list[Block]:
    """The Python blocks of the README."""
    return _fences(README)


def page_blocks() -> list[Block]:
    """The Python blocks of the pages in docs/."""
    return [block for page in PAGES for block in _fences(page)]


def _fences(path: Path) -> list[Block]:
    text = path.read_text()
    name = str(path.relative_to(ROOT))
    fences = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(name, text[: f.start(1)].count("\n") + 1, f.group(1)) for f in fences]


def docstring_blocks() -> list[Block]:
    """The literal blocks of the docstring of ``reloadpg.environment``."""
    docstring = ast.get_docstring(ast.parse(ENVIRONMENT.read_text()), clean=True) or ""
    blocks = re.finditer(r"::\n\n((?:(?:    .*)?\n)+)", docstring + "\n")
    return [
        Block(
            "environment",
            docstring[: block.start(1)].count("\n") + 1,
            textwrap.dedent(block.group(1)).strip() + "\n",
        )
        for block in blocks
    ]
