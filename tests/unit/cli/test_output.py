"""Tables for people, JSON for programs."""

from __future__ import annotations

import json

import pytest

from holdfast.cli.output import print_json, print_table


def test_a_table_aligns_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("NAME", "SIZE", ""), [("a", "1 B", "x"), ("long_name", "10 B", "")], right=(1,))
    assert capsys.readouterr().out.splitlines() == [
        "NAME       SIZE",
        "a           1 B  x",
        "long_name  10 B",
    ]


def test_nan_and_infinity_become_strings_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": float("nan"), "name": "Größe"})
    out = capsys.readouterr().out
    assert "Größe" in out
    assert json.loads(out, parse_constant=pytest.fail) == {
        "loss": {"$float": "nan"},
        "name": "Größe",
    }
