"""What the docs say about the source is true: the files, functions and words that they name exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tests.unit.mentioned_names import ROOT, holdfast_project

PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
ARCHITECTURE = ROOT / "docs" / "architecture.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
_FILE = re.compile(r"`([\w/-]+/[\w-]+\.(?:py|sh))(?::([\w.]+))?`")
_TYPE = re.compile(
    r"`((?:[a-z_]\w*\.)*[A-Z]\w*[a-z]\w*(?:\.\w+)?|(?:core|checkpoint|storage|holdfast)\.[\w.]+)(?:\(\))?`"
)
_STOP = re.compile(r"^\| *(\d+) *\|", re.MULTILINE)
_FOREIGN_TYPES = {"S3FileSystem"}


def _page_name(path: Path) -> str:
    return path.name


def _defines(path: Path, name: str) -> bool:
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


@pytest.mark.parametrize("page", PAGES, ids=_page_name)
def test_files_and_functions_that_the_docs_name_exist(page: Path) -> None:
    """`core/machine.py` is a file below src/holdfast or the repository; `core/machine.py:step` defines that name."""
    wrong = []
    for file, name in _FILE.findall(page.read_text()):
        path = next((root / file for root in (ROOT / "src/holdfast", ROOT) if (root / file).exists()), None)
        if path is None or (name and not _defines(path, name)):
            wrong.append(f"{file}:{name}".rstrip(":"))
    assert not wrong


@pytest.mark.parametrize("page", [ARCHITECTURE, GLOSSARY], ids=_page_name)
def test_types_and_modules_that_the_docs_name_exist(page: Path) -> None:
    project = holdfast_project()
    names = set(_TYPE.findall(page.read_text())) - _FOREIGN_TYPES
    assert not sorted(name for name in names if not project.has(name.removeprefix("holdfast.")))


def test_the_walk_from_report_to_the_manifest_has_at_most_30_stops() -> None:
    section = ARCHITECTURE.read_text().split("## From `report()` to the manifest")[1].split("\n## ")[0]
    stops = [int(number) for number in _STOP.findall(section)]
    assert stops == list(range(1, len(stops) + 1))
    assert 10 < len(stops) <= 30
    assert len(_FILE.findall(section)) >= len(stops)


def test_every_word_of_the_glossary_is_used_in_the_source() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py")).lower()
    words = re.findall(r"^- \*\*(.+?)\*\*", GLOSSARY.read_text(), re.MULTILINE)
    assert words == sorted(words)
    assert not [word for word in words if not re.search(rf"\b{word}s?\b", source)]
