"""The fingerprint of a script is the same in every process that runs it, and differs if its behaviour may differ."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from holdfast.control.fingerprint import Fingerprint
from holdfast.train.code_fingerprint import fingerprint

_SCRIPT = """
    import argparse, dataclasses, datetime, enum, functools, re, tempfile, time
    from pathlib import Path
    from types import SimpleNamespace
    import numpy as np
    import torch
    import helpers
    import pack.inner
    from helpers import scaled

    EPOCHS = 20
    NAMES = {"a", "b", "c", ("x", 1)}
    TABLE = {name: len(name) for name in {"one", "three", "seventeen"}}
    NESTED = {"k": [{"s1", "s2"}, frozenset({"f1", "f2"})]}
    WEIGHTS = np.array([0.25, 0.75])
    TENSOR = torch.arange(6).reshape(2, 3)
    BIG = np.zeros(10_000_000)
    PATTERN = re.compile("a+")
    WHERE = Path("/data")
    STARTED, STARTED_NS, BEGAN = time.time(), time.time_ns(), datetime.datetime.now()
    TEMPORARY = tempfile.mkdtemp()
    OPAQUE = object()
    LAMBDAS = [lambda x: x + 1, lambda x: x + 2]
    ARGUMENTS = argparse.Namespace(lr=0.1, layers=[1, 2])
    CYCLE = []
    CYCLE.append(CYCLE)
    HUGE = 10**400
    API_KEY = "hunter2"

    class Colour(enum.Enum):
        RED = 1
        BLUE = "b"

    @dataclasses.dataclass
    class Settings:
        lr: float = 0.1
        tags: set = dataclasses.field(default_factory=lambda: {"p", "q"})

    class Base:
        factor = 3
        choices = {"u", "v"}

        @property
        def doubled(self):
            return self.factor * 2

        @doubled.setter
        def doubled(self, value):
            self.factor = value

        @staticmethod
        def helper():
            return 1

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 3)

        def forward(self, x):
            return self.layer(x)

    model = Net()
    settings = Settings()
    bound = SimpleNamespace(a=1, b={"s", "t"})

    @functools.lru_cache
    def cached(n):
        return n if n < 2 else cached(n - 1) + helpers.plain(n)

    def decorated(function):
        @functools.wraps(function)
        def inner(*args):
            return function(*args)
        return inner

    @decorated
    def stepped(x):
        "A docstring."
        return [y for y in range(x) if y in {"q", "w", "e"}]

    def train_loop(config, limit=5, *, kind=Colour.RED):
        import lazily
        from pack import other
        def nested():
            return EPOCHS, WHERE, PATTERN
        use = (NAMES, TABLE, NESTED, WEIGHTS, TENSOR, BIG, STARTED, STARTED_NS, BEGAN, TEMPORARY, OPAQUE, LAMBDAS)
        more = (ARGUMENTS, CYCLE, HUGE, API_KEY, model, settings, bound, Base().doubled, Base.helper(), np.mean)
        return scaled(2), helpers.plain(1), pack.inner.deep(), cached(3), stepped(1), nested(), use, more

    if __name__ == "__main__":
        import json, sys
        from holdfast.train.code_fingerprint import fingerprint
        config = {"lr": 0.1, "sets": {"a", "b"}, "nested": {"token": "hunter3", "function": scaled}}
        print(json.dumps(fingerprint(train_loop, config).stored({"salt": "00"})))
"""
_FILES = {
    "script.py": _SCRIPT,
    "helpers.py": """
        FACTOR = 3

        def scaled(value):
            return value * FACTOR

        def plain(value):
            return value
    """,
    "pack/__init__.py": "",
    "pack/inner.py": "def deep():\n    return 1\n",
    "pack/other.py": "VALUE = 1\n",
    "lazily.py": "import further\nVALUE = 1\n",
    "further.py": "VALUE = 1\n",
}


_RUNNER = """
import os, runpy, sys
import numpy, torch
for directory in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        sys.path.insert(0, directory)
        runpy.run_path(os.path.join(directory, "script.py"), run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""
"""Runs the script of each directory in a process of its own; torch is imported once for all."""

_COUNTS: list[tuple[str, str, str, list[str] | None]] = [
    ("script.py", "EPOCHS = 20", "EPOCHS = 40", ["`EPOCHS` was 20 and is 40"]),
    ("script.py", "limit=5", "limit=6", ["`limit of train_loop` was 5 and is 6"]),
    ("script.py", "0.25, 0.75", "0.5, 0.5", ["`WEIGHTS` changed"]),
    ("script.py", '"/data"', '"/other"', ["`WHERE` changed"]),
    ("script.py", "lr: float = 0.1", "lr: float = 0.2", None),
    ("script.py", "factor = 3", "factor = 4", ["`Base.factor` was 3 and is 4"]),
    ("script.py", "return self.factor * 2", "return self.factor * 3", ["source of `Base.doubled` changed"]),
    ("script.py", "Linear(2, 3)", "Linear(2, 4)", None),
    ("script.py", "x + 2", "x + 3", ["source of `<lambda>` changed"]),
    ("script.py", "hunter2", "hunter4", ["`API_KEY` changed"]),
    ("script.py", "hunter3", "hunter4", ["train_loop_config `nested.token` changed"]),
    ("script.py", '"lr": 0.1', '"lr": 0.2', ["train_loop_config `lr` was 0.1 and is 0.2"]),
    ("script.py", '"lr": 0.1, "sets"', '"sets"', ["train_loop_config `lr` is not there any more"]),
    ("script.py", "np.mean)", "np.sum)", ["source of `train_loop` changed"]),
    ("script.py", "n if n < 2", "n if n < 3", ["source of `cached` changed"]),
    ("script.py", '"q", "w", "e"', '"q", "w", "r"', ["source of `stepped` changed"]),
    ("script.py", "lr=0.1, layers", "lr=0.2, layers", ["`ARGUMENTS` changed"]),
    ("helpers.py", "FACTOR = 3", "FACTOR = 4", ["`helpers.FACTOR` was 3 and is 4"]),
    ("helpers.py", "return value\n", "return value + 1\n", ["source of `helpers.plain` changed"]),
    (
        "pack/inner.py",
        "return 1",
        "return 2",
        ["source of `module pack.inner` changed", "source of `pack.inner.deep` changed"],
    ),
    ("pack/other.py", "VALUE = 1", "VALUE = 2", ["source of `module pack.other` changed"]),
    ("lazily.py", "VALUE = 1", "VALUE = 2", ["source of `module lazily` changed"]),
    ("further.py", "VALUE = 1", "VALUE = 2", ["source of `module further` changed"]),
]
"""An edit, and what is told of it; None: something is."""

_COUNTS_NOT: list[tuple[str, str, str]] = [
    ("script.py", "def nested():", "# a comment\n\n    def nested():"),
    ("script.py", "return EPOCHS, WHERE, PATTERN", "return (\n  EPOCHS,\n  WHERE, PATTERN\n  )"),
    ("script.py", '"A docstring."', '"Another docstring."'),
    ("script.py", "import json, sys", "import json, sys, os"),
    ("helpers.py", "def plain", "UNUSED = 7\n\ndef unused():\n    return UNUSED\n\ndef plain"),
    ("pack/other.py", "VALUE = 1", "VALUE = 1  # a comment"),
]


def _write(directory: Path, file: str = "", old: str = "", new: str = "") -> Path:
    for name, text in _FILES.items():
        text = textwrap.dedent(text)
        if name == file:
            assert text.count(old) == 1
            text = text.replace(old, new)
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def _run(root: Path, directories: list[Path], seed: int, cwd: str) -> list[dict[str, Any]]:
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "TMPDIR": str(root)}
    command = [sys.executable, "-B", "-c", _RUNNER, *map(str, directories)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def fingerprints(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of the project as it is, after each edit, and as it is again with another seed of hashes in another directory."""
    root = tmp_path_factory.mktemp("projects")
    edits = [*(edit[:3] for edit in _COUNTS), *_COUNTS_NOT]
    same = _write(root / "same")
    edited = [_write(root / f"edit_{at}", *edit) for at, edit in enumerate(edits)]
    found = _run(root, [same, *edited], seed=1, cwd=str(root))
    return found + _run(root, [same], seed=2, cwd=str(same))


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The differences that the second fingerprint reports against the first."""

    class Told(Fingerprint):
        def stored(self, before: Any = None) -> dict[str, Any]:
            return after

    return Told().changes_since(before)


def test_the_fingerprint_does_not_depend_on_the_hash_seed(fingerprints: list[dict[str, Any]]) -> None:
    first, *_, again = fingerprints
    assert len(first["values"]) > 20 and len(first["code"]) > 15
    assert _changes(first, again) == []
    assert {key: one[0] for key, one in first["values"].items()} == {
        key: one[0] for key, one in again["values"].items()
    }
    assert first["code"] == again["code"]
    assert "hunter" not in json.dumps(first)


@pytest.mark.parametrize("at", range(len(_COUNTS)), ids=[f"{edit[0]}: {edit[2]}" for edit in _COUNTS])
def test_changes_in_reachable_code_and_values_change_the_fingerprint(
    fingerprints: list[dict[str, Any]], at: int
) -> None:
    changes, told = _changes(fingerprints[0], fingerprints[1 + at]), _COUNTS[at][3]
    assert changes == told if told is not None else changes


@pytest.mark.parametrize("at", range(len(_COUNTS_NOT)))
def test_changes_without_effect_keep_the_fingerprint(fingerprints: list[dict[str, Any]], at: int) -> None:
    assert _changes(fingerprints[0], fingerprints[1 + len(_COUNTS) + at]) == []


def test_fingerprints_of_every_kind_of_callable() -> None:
    class Caller:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        def __call__(self, config: dict[str, Any]) -> int:
            return self.factor

        def method(self, config: dict[str, Any]) -> int:
            return self.factor

    def changes(first: Any, second: Any) -> list[str]:
        return fingerprint(second, None).changes_since(fingerprint(first, None).stored())

    def closed(number: int) -> Any:
        return lambda: number

    assert changes(closed(1), closed(1)) == []
    assert len(changes(closed(1), closed(2))) == 1
    assert changes(Caller(1), Caller(1)) == [] == changes(Caller(1).method, Caller(1).method)
    assert len(changes(Caller(1), Caller(2))) == 1 == len(changes(Caller(1).method, Caller(2).method))
    partial = functools.partial(Caller(1).method, {"a": 1})
    assert changes(partial, functools.partial(Caller(1).method, {"a": 1})) == []
    assert len(changes(partial, functools.partial(Caller(1).method, {"a": 2}))) == 1
    assert changes(closed(1), Caller(1)) != []


class _Proxy:
    """Stands for what is not there yet, as settings that are read later on do."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("There is nothing behind this yet.")


class _HasProxy:
    setting = _Proxy()


_PROXY = _Proxy()
_PROXIES = [_PROXY]


def test_an_object_that_does_not_say_what_it_is_counts_by_its_type() -> None:
    def function() -> Any:
        return _PROXY, _PROXIES, _HasProxy

    found = fingerprint(function, None)
    assert any(name.endswith("._PROXY") for name in found.values)
    assert fingerprint(function, None).changes_since(found.stored()) == []


def test_another_python_version_is_reported_as_such() -> None:
    now = fingerprint(test_another_python_version_is_reported_as_such, None)
    before = now.stored() | {"python": "3.8", "code": {}}
    assert now.changes_since(before) == [f"Python was 3.8 and is {now.python}, so that code cannot be compared"]


def test_hashes_of_values_are_salted() -> None:
    """The kept hash has 32 bits and a salt of its own in each run."""
    first, second = (fingerprint(print, {"password": "a"}).stored() for _ in range(2))
    assert first["config"]["password"] != second["config"]["password"]
    assert len(first["config"]["password"][0]) == len("salted:") + 8
    assert fingerprint(print, {"password": "a"}).changes_since(first) == []
    assert fingerprint(print, {"password": "b"}).changes_since(first) == ["train_loop_config `password` changed"]
