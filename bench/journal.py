"""`make bench-journal`: what a long run costs its driver: memory while it reports, and the time until it goes on.

One run reports up to a million times, with a checkpoint now and then; the driver's memory is read when 10,000 and when
all reports are in the result files. Then the driver is killed, and started again: what counts is the time until the
function is called, against that of a run that has reported ten times. Aims: at most 20 MB and 1 s more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["main"]

_YOUNG = 10
_MB = 1_000_000
_MEMORY_AIM_BYTES = 20 * _MB
_START_AIM_S = 1.0


class _Run:
    """One run's storage, and the driver that is at work on it."""

    def __init__(self, total: int, stops: list[int]) -> None:
        self.storage = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        os.mkfifo(self.storage / "go")
        every = max(5, total // 100)
        self._command = [sys.executable, "-m", "bench.drivers.reporting", str(self.storage), str(total + 1), str(every)]
        self._stops = stops
        self._started_at = 0.0
        self._driver: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "HOLDFAST_QUIET": "1", "HOLDFAST_LOCAL_CACHE_DIR": str(self.storage / "cache")}
        self._started_at = time.time()
        self._driver = subprocess.Popen([*self._command, *map(str, self._stops)], env=environment)

    def wait_for(self, what: str, count: int, after: int = 0) -> dict[str, Any]:
        while True:
            for line in self._told()[after:]:
                if line["what"] == what and line["count"] >= count:
                    return line
            assert self._driver is not None and self._driver.poll() is None, "the driver is gone"
            time.sleep(0.02)

    def wait_for_files(self, rows: int) -> None:
        """Until the result files hold all that was reported."""
        path = self.storage / "run" / "result.json"
        while True:
            last = path.read_bytes()[-400:].splitlines()[-1:] if path.exists() else []
            if last and f'"training_iteration":{rows}'.encode() in last[0]:
                return
            time.sleep(0.1)

    def memory_bytes(self) -> int:
        assert self._driver is not None
        text = Path(f"/proc/{self._driver.pid}/smaps_rollup").read_text()
        return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss_Anon:"))

    def go(self) -> None:
        (self.storage / "go").write_text("\n")

    def restart_s(self) -> float:
        """Kill the driver, start it again, and wait until the function begins."""
        self.kill()
        told = len(self._told())
        self.start()
        return float(self.wait_for("began", 0, told)["at"]) - self._started_at

    def kill(self) -> None:
        assert self._driver is not None
        self._driver.send_signal(signal.SIGKILL)
        self._driver.wait()
        time.sleep(2.0)  # its agent tidies up, and would share the processor

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.storage, ignore_errors=True)

    def _told(self) -> list[dict[str, Any]]:
        path = self.storage / "told"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reports", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    few, many = min(10_000, options.reports // 2), options.reports
    old, young = _Run(many, [few, many]), _Run(_YOUNG, [_YOUNG])
    try:
        old.start()
        old.wait_for("reported", few)
        old.wait_for_files(few)
        before = old.memory_bytes()
        old.go()
        began = time.monotonic()
        old.wait_for("reported", many)
        reported_s = time.monotonic() - began
        old.wait_for_files(many)
        shown_s = time.monotonic() - began
        after = old.memory_bytes()
        young.start()
        young.wait_for("reported", _YOUNG)
        pairs = [(old.restart_s(), young.restart_s()) for _ in range(options.rounds)]
    finally:
        old.close()
        young.close()
    grown = after - before
    old_s, young_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"reports                          {many:,} in {reported_s:.1f} s, in the files after {shown_s:.1f} s")
    print(f"driver's memory                  {before / _MB:.0f} MB after {few:,}, {after / _MB:.0f} MB after {many:,}")
    print(f"  grown by                       {grown / _MB:.1f} MB (aim: {_MEMORY_AIM_BYTES / _MB:.0f})")
    print(f"killed, to the function's start  {old_s:.2f} s after {many:,} reports, {young_s:.2f} s after {_YOUNG}")
    print(f"  longer by                      {old_s - young_s:.2f} s (aim: {_START_AIM_S:.0f})")
    met = grown <= _MEMORY_AIM_BYTES and old_s - young_s <= _START_AIM_S
    print("every aim is met" if met else "an aim is MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
