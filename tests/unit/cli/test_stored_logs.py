"""What `holdfast logs` reads of a run that has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli import logs
from holdfast.storage.posix.store import PosixStore


def test_a_file_of_the_users_is_no_log_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PosixStore(tmp_path)
    store.put("logs/generation_000001/rank_0.log", b"line\n")
    store.put("logs/generation_000001/output/rank_7.log", b"line\n")
    monkeypatch.setattr(logs, "_last_generation", lambda _: 1)
    assert list(logs._stored_lines(store, None)) == [(0, "line")]
