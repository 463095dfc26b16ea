"""The notice file: what it may hold, and that it is noticed however it is written."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.agent.notice_file import parse_notice, watch_notice_file

_NOW = 1_700_000_000.0  # 2023-11-14T22:13:20Z


@pytest.mark.parametrize(
    ("text", "left_s"),
    [
        ("", None),
        (" \n", None),
        ("{}", None),
        ("30", 30.0),
        ("2.5\n", 2.5),
        ("-4", 0.0),
        ("2023-11-14T22:15:20Z", 120.0),
        ("2023-11-14T23:15:20+01:00\n", 120.0),
        ("2023-11-14T22:15:20", 120.0),
        ("2023-11-14T22:00:00Z", 0.0),
        ('{"action": "terminate", "time": "2023-11-14T22:15:20Z"}', 120.0),
    ],
)
def test_what_a_notice_says(text: str, left_s: float | None) -> None:
    assert parse_notice(text, _NOW) == left_s


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "1e12", '{"time": 3}', "{", '{"time": "soon"}'])
def test_a_notice_that_says_something_else(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_notice(text, _NOW)


@pytest.mark.parametrize(("text", "left_s"), [("12", 12.0), ("", None), ("soon", None)])
def test_a_notice_file_is_noticed_when_it_appears(tmp_path: Path, text: str, left_s: float | None) -> None:
    async def test() -> float | None:
        async with asyncio.timeout(60):
            watch = asyncio.ensure_future(watch_notice_file(tmp_path / "notice", lambda: _NOW))
            await asyncio.sleep(0)
            assert not watch.done()
            (tmp_path / "notice").write_text(text)
            return await watch

    assert asyncio.run(test()) == left_s


def test_a_notice_file_that_cannot_be_read_is_a_notice(tmp_path: Path) -> None:
    (tmp_path / "notice").mkdir()
    assert asyncio.run(watch_notice_file(tmp_path / "notice", lambda: _NOW)) is None
