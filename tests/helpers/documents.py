"""Extracts the code blocks of the documents.

A comment on the line before a block of a page says how it is run, if not as it is:

- ``<!-- not run: REASON -->``: never; ``.ci/pages --list`` prints these, with the reason;
- ``<!-- run by: COMMAND, FILE -->``: by that command, in whose file the block's lines are;
- ``<!-- file: NAME -->``: it is a file that the page's commands use;
- ``<!-- ends with 1: REASON -->``: its last command does.
"""

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

LANGUAGES = ("python", "sh", "text")
"""Of blocks: Python and commands, which are run, and text, such as the output of a command."""

_FENCE = re.compile(
    r"^(?:<!-- (?P<how>not run|run by|file|ends with 1): (?P<what>[^\n]+) -->\n)?"
    r"```(?P<language>\w+|\{[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One example: its document, its first line, its language and its code."""

    document: str
    line: int
    code: str
    language: str = "python"
    how: str = ""
    """``not run``, ``run by``, ``file``, ``ends with 1``, or nothing."""
    what: str = ""
    """The reason, the command, or the name of the file."""

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of a block, without comments; a line that ends with a backslash goes on."""
        lines = self.code.replace("\\\n", " ").splitlines()
        stripped = (re.sub(r"(^|\s+)# .*$", "", line).strip() for line in lines)
        return [line for line in stripped if line]


def blocks_of(path: Path) -> list[Block]:
    """All blocks of a page, but those that Sphinx fills in."""
    text = path.read_text()
    name = str(path.relative_to(ROOT))
    return [
        Block(
            name,
            text[: fence.start("code")].count("\n") + 1,
            fence["code"],
            fence["language"],
            fence["how"] or "",
            fence["what"] or "",
        )
        for fence in _FENCE.finditer(text)
        if not fence["language"].startswith("{")
    ]


def has_indented_block(path: Path) -> bool:
    """Whether a page has an indented block, which has no language."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return "\n\n    " in text


def python_blocks(path: Path) -> list[Block]:
    """The Python blocks of a page that are run as they are, or by the frameworks' session."""
    return [
        block
        for block in blocks_of(path)
        if block.language == "python"
        and (not block.how or block.what.startswith("nox -s frameworks"))
    ]


def page_blocks() -> list[Block]:
    """The Python blocks of the README and of the pages in docs/."""
    return [block for page in [README, *PAGES] for block in python_blocks(page)]


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
