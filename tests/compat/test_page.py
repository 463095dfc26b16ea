"""docs/migrating.md and docs/migrating-tune.md say what the lists of differences say."""

from __future__ import annotations

from tests.compat.page import PAGE, TUNE_PAGE, render, render_tune


def test_the_page_is_made_from_the_list() -> None:
    assert PAGE.read_text() == render(), "run: python -m tests.compat.page"
    assert TUNE_PAGE.read_text() == render_tune(), "run: python -m tests.compat.page"
