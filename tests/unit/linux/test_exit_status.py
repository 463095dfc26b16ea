"""Descriptions of wait statuses."""

from __future__ import annotations

import signal
import subprocess
import sys

from holdfast.linux.exit_status import exit_status_of
from holdfast.linux.memory import OomKills


def test_descriptions_of_exit_statuses() -> None:
    assert exit_status_of(0).cause == "exited with code 0 before its function returned"
    assert exit_status_of(3 << 8).cause == "exited with code 3"
    assert exit_status_of(signal.SIGSEGV).cause == "was killed by SIGSEGV"
    assert exit_status_of(signal.SIGSEGV | 0x80).signal == signal.SIGSEGV  # with a core dump
    assert exit_status_of(signal.SIGRTMIN + 3).cause == "was killed by signal 37"


def test_only_sigkill_may_mean_out_of_memory() -> None:
    assert exit_status_of(signal.SIGKILL, out_of_memory=True).cause == "was killed by SIGKILL (out of memory)"
    assert exit_status_of(signal.SIGTERM, out_of_memory=True).cause == "was killed by SIGTERM"


def test_an_ordinary_kill_does_not_count_as_out_of_memory() -> None:
    before = OomKills().count()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.kill()
    process.communicate()
    assert OomKills().count() == before
