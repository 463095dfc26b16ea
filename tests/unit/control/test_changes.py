"""What is said when a run is continued by a script that is not the one that began it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.control.history import History
from holdfast.control.setup import _warn_of_changes


@pytest.mark.parametrize(
    ("changes", "told", "another_name"),
    [
        (["source of `loop` changed"], "continues with changed code: source of `loop` changed.", False),
        (["source of `loop` changed", "`lr` was 1 and is 2"], "continues, but not as it was started", True),
    ],
)
def test_changed_source_alone_is_no_reason_for_another_name(
    changes: list[str], told: str, another_name: bool, caplog: pytest.LogCaptureFixture
) -> None:
    request: Any = SimpleNamespace(resume="auto")
    store: Any = SimpleNamespace(uri="/runs/x")
    _warn_of_changes(request, store, History(True), changes)
    assert told in caplog.text
    assert ("another name" in caplog.text) == another_name
