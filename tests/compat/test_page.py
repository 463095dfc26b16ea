"""docs/migrating.md says what the list of differences says."""

from __future__ import annotations

from tests.compat.page import PAGE, render


def test_the_page_is_made_from_the_list() -> None:
    assert PAGE.read_text() == render(), "run: python -m tests.compat.page"
