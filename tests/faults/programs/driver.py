"""A driver in its own process, and all records that it has printed so far."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.faults.programs import processes

__all__ = ["Driver", "Line"]

Line = dict[str, Any]
"""One line of a driver's output: a record of the run, output of a worker, or how it ended."""

_REPOSITORY = Path(__file__).resolve().parents[3]
_DEADLINE_S = 60.0


class Driver:
    """`python -m tests.faults.programs.driver_main`. `expect` waits for a line; nothing is polled."""

    def __init__(self, options: Mapping[str, Any], errors: Path, environment: Mapping[str, str] | None = None) -> None:
        self._errors = errors
        self.lines: list[Line] = []
        self._news = threading.Condition()
        self._over = False
        with errors.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.programs.driver_main", json.dumps(options)],
                cwd=_REPOSITORY,
                env={**os.environ, "HOLDFAST_JSON": "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
            )
        self._reader = threading.Thread(target=self._read, name="driver-output")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def errors(self) -> str:
        """What it wrote to standard error so far."""
        return self._errors.read_text()

    def agents(self) -> list[int]:
        return [pid for pid in processes.children(self.pid) if "holdfast.agent" in processes.command_of(pid)]

    def zygotes(self) -> list[int]:
        return [pid for agent in self.agents() for pid in processes.children(agent)]

    def workers(self) -> list[int]:
        """Its zygotes have other children, too: trial imports, and the next zygote."""
        below = [pid for zygote in self.zygotes() for pid in processes.children(zygote)]
        return [pid for pid in below if processes.name_of(pid).startswith("hf-rank")]

    def expect(self, kind: str, *, after: int = 0, **fields: Any) -> Line:
        """The first line of this kind, from the `after`-th on, with these fields; waits for it."""

        def fits(line: Line) -> bool:
            return line.get("kind") == kind and all(line.get(key) == value for key, value in fields.items())

        return self._find(fits, after, f"{kind} {fields}")

    def expect_step(self, step: int, generation: int | None = None) -> Line:
        """The report of this step (see `jobs.steps`)."""

        def fits(line: Line) -> bool:
            same = generation is None or line.get("generation") == generation
            return line.get("kind") == "Reported" and line["metrics"]["step"] == step and same

        return self._find(fits, 0, f"a report of step {step}")

    def expect_any(self, kind: str, *, count: int) -> None:
        """Until there were so many lines of this kind."""
        with self._news:
            self._news.wait_for(lambda: self._over or len(self.all(kind)) >= count, _DEADLINE_S)
        assert len(self.all(kind)) >= count, f"{count} x {kind} never came; {self.lines[-3:]}\n{self.errors}"

    def all(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line.get("kind") == kind]

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def end(self) -> int:
        """Its exit code, waited for, with all of its output read."""
        code = self.process.wait(_DEADLINE_S)
        self._reader.join(_DEADLINE_S)
        assert not self._reader.is_alive(), "somebody else still holds the driver's output"
        return code

    def value(self) -> Any:
        """What `fit()` returned; fails if it raised."""
        code = self.end()
        assert code == 0, (code, self.lines[-1:], self.errors)
        return self.lines[-1]["value"]

    def raised(self) -> Line:
        assert self.end() != 0, self.lines[-1]
        assert self.lines[-1]["kind"] == "Raised", self.errors
        return self.lines[-1]

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self._reader.join(_DEADLINE_S)

    def _find(self, fits: Callable[[Line], bool], after: int, what: str) -> Line:
        def found() -> Line | None:
            return next((line for line in self.lines[after:] if fits(line)), None)

        with self._news:
            self._news.wait_for(lambda: self._over or found() is not None, _DEADLINE_S)
            line = found()
        assert line is not None, f"{what} never came; {self.lines[-3:]}\n{self.errors}"
        return line

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # the driver was killed while it wrote
                with self._news:
                    self.lines.append(json.loads(line))
                    self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()
