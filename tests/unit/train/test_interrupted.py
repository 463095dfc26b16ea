"""What `fit()` raises after Ctrl+C: it ends a script, and leaves a notebook or a prompt alive."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from holdfast.train.interrupted import make_interrupted


@pytest.mark.parametrize(("why", "code"), [("Ctrl+C", 130), ("SIGTERM", 143)])
def test_a_script_is_ended_with_the_code_of_the_signal(why: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "ps1", raising=False)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # imported, not running
    error = make_interrupted(why)
    assert isinstance(error, KeyboardInterrupt) and isinstance(error, SystemExit)
    assert error.code == code


def test_a_notebook_goes_on_and_shows_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    error = make_interrupted("Ctrl+C")
    assert isinstance(error, KeyboardInterrupt) and not isinstance(error, SystemExit)
    assert error._render_traceback_() == ["The run was stopped (Ctrl+C); the same call continues it."]


def test_a_prompt_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert not isinstance(make_interrupted("Ctrl+C"), SystemExit)
