"""The check of a reported directory is made at every checkpoint, and costs little."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.unit.worker.fake_agent import make_assignment

from holdfast.errors import ConfigError
from holdfast.worker.reported_directory import check_reported_directory


def test_each_directory_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, staging, mine = (tmp_path / name for name in ("storage/run", "cache/staging", "mine"))
    for directory in (run, staging, mine):
        directory.mkdir(parents=True)
    looks: Counter[Path] = Counter()
    stat = Path.stat

    def counting(path: Path, **options: Any) -> Any:
        looks[path] += 1
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", counting)
    check_reported_directory(mine, run, make_assignment(staging_dir=str(staging)), move=False)
    assert looks.pop(mine) == 2, "whether it is there, and which it is"
    assert set(looks.values()) == {1}
    with pytest.raises(ConfigError, match="the run's storage"):
        check_reported_directory(tmp_path / "storage", run, make_assignment(staging_dir=str(staging)), move=False)
