"""The job as it is sent to workers."""

from __future__ import annotations

import linecache
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.control.job_pickle import PickledJob, pickle_job
from holdfast.worker.job import Job
from holdfast.worker.job_loader import load_job

_CELL = "def helper():\n    raise ValueError('bad')  # on this line\n\ndef loop():\n    helper()\n"


def _enter_cell(name: str, text: str) -> Callable[[], None]:
    """Run a cell as IPython does; gives its function `loop`."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "no_module_of_this_name"}
    exec(compile(text, name, "exec"), space)
    function: Callable[[], None] = space["loop"]
    return function


def _load(pickled: PickledJob) -> Job:
    fd = os.memfd_create("job")
    try:
        os.write(fd, pickled.function)
        job = load_job(fd).job
    finally:
        os.close(fd)
    assert isinstance(job, Job)
    return job


_CACHED = """
from functools import cache, lru_cache

@cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

@lru_cache(maxsize=7)
def twice(n):
    "Doc."
    return 2 * n

def loop():
    return fibonacci(60), twice(2), twice.cache_parameters(), twice.__doc__, twice.cache_info().currsize
"""


def test_cached_functions_of_a_script_travel_by_value_and_are_empty_there() -> None:
    function = _enter_cell("<cell 3>", _CACHED)
    expected = function()
    job = _load(pickle_job(Job(function=function, config=None, takes_config=False, framework=None)))
    assert job.function is not function
    assert job.function() == expected == (1548008755920, 4, {"maxsize": 7, "typed": False}, "Doc.", 1)


def test_the_source_of_cells_travels_with_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linecache, "cache", {})
    function = _enter_cell("<cell 1>", _CELL)
    _enter_cell("<cell 2>", "def loop():\n    password = 'of another cell'\n")
    pickled = pickle_job(Job(function=function, config=None, takes_config=False, framework=None))
    assert b"of another cell" not in pickled.function
    monkeypatch.setattr(linecache, "cache", {})
    job = _load(pickled)
    with pytest.raises(ValueError) as caught:
        job.function()
    linecache.checkcache()
    assert "raise ValueError('bad')  # on this line" in "".join(traceback.format_exception(caught.value))
