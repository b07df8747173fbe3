"""The pages in docs/: quoted messages, links, figures and included examples exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from helpers.documents import PAGES, README, ROOT

TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *PAGES]


def messages() -> Iterator[str]:
    """Every string of the library as it is written, with an ellipsis for what is filled in."""
    for path in sorted((ROOT / "reloadpg").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                yield "".join(str(part) for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def quoted() -> list[str]:
    """Of errors, after the class; and of the warnings in a report."""
    text = TROUBLESHOOTING.read_text()
    errors = re.findall(r"^### [^`]+: `(.+)`$", text, re.MULTILINE)
    warnings = text.partition("## Warnings of a report")[2].partition("\n## ")[0]
    return [*errors, *re.findall(r"^\| `(.+?)` \|", warnings.partition("| --- ")[2], re.MULTILINE)]


def test_quoted_messages_are_those_of_the_library() -> None:
    """Word for word; a quotation may be cut at its end."""
    written = set(messages())
    assert len(quoted()) >= 15
    unknown = [
        quotation
        for quotation in quoted()
        if not any(quotation.removesuffix(" …") in message for message in written)
    ]
    assert unknown == []


PLACEHOLDER = re.compile(r"%(?:\.\d+)?[a-z]")


def warnings_of_the_library() -> Iterator[str]:
    """The text of each call that warns, or logs a warning; an ellipsis for what is filled in."""
    for path in sorted((ROOT / "reloadpg").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func)
            if not name.endswith(".warning") and name not in ("warn", "warnings.warn"):
                continue
            text = node.args[0]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            said = (one.value if isinstance(one, ast.Constant) else "…" for one in parts)
            yield PLACEHOLDER.sub("…", "".join(map(str, said)))


def test_each_warning_is_explained() -> None:
    """A part of its text between what is filled in; that of a report has the report's headings."""
    rows = re.findall(r"^\| `(.+?)` \|", TROUBLESHOOTING.read_text(), re.MULTILINE)
    headings = re.findall(r"^### .*`(.+)`$", TROUBLESHOOTING.read_text(), re.MULTILINE)
    parts = [max(one.split("…"), key=len).strip(" :;") for one in (*rows, *headings)]
    parts = [part for part in parts if len(part) > 10]
    warned = [one for one in warnings_of_the_library() if re.search(r"\w{3}", one)]
    assert len(warned) >= 10
    of_report = "reloadpg.install(): …"
    unexplained = [w for w in warned if w != of_report and not any(p in w for p in parts)]
    assert unexplained == []
    table = TROUBLESHOOTING.read_text().partition("## Other warnings")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    longest = [max(row.split("…"), key=len).strip(" :;") for row in rows]
    assert [one for one in longest if not any(one in text for text in warned)] == []


def test_each_public_error_is_explained() -> None:
    """By name, on the page or in the table of the README."""
    import reloadpg

    errors = {name for name in reloadpg.__all__ if name.endswith("Error")}
    text = TROUBLESHOOTING.read_text() + README.read_text()
    rare = {"ReloadpgError", "GroupDestroyedError", "GroupPickleError", "InvalidOptionError"}
    assert {name for name in errors - rare if name not in text} == set()


def test_links_and_figures_exist() -> None:
    """Within the repository, in the README, CONTRIBUTING and the pages."""
    broken = []
    for document in DOCUMENTS:
        text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in target and not (document.parent / target).exists():
                broken.append((document.name, target))
    assert broken == []


@pytest.mark.parametrize("table", ["CONTRIBUTING.md", "benchmarks/README.md"])
def test_the_tests_that_a_table_of_proofs_names_exist(table: str) -> None:
    text = (ROOT / table).read_text()
    named = re.findall(r"`(?:tests/)?((?:\w+/)?test_\w+\.py)`", text)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []


def test_all_pages_of_users_together_have_at_most_14_500_words() -> None:
    """What a user does not ask for, and reasons that only a developer needs, are not in a page."""
    pages = [page for page in PAGES if page.name != "architecture.md"]
    assert sum(len(page.read_text().split()) for page in pages) <= 14_500
