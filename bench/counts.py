"""`make counts`: what a run that does nothing, a report, a commit and a restart cost, in things that can be counted.

System calls, fsyncs and files in storage come from strace, requests from an S3 server (moto) that counts them, messages
from the driver, CPU seconds from the kernel, in a run of their own without strace. Wall time is not looked at, so a
busy machine changes little. `python -m bench.counts --source CHECKOUT` counts another checkout, to compare commits.

The cost of one report or commit is the difference between a run with many and one with few, divided by how many more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["main", "system_calls"]

_ROOT = Path(__file__).resolve().parents[1]
_DRIVER = Path(__file__).with_name("drivers") / "counted.py"
_CALL = re.compile(r"^\d+\s+(\w+)\((.*)$")
_FEW = 5
_FSYNC = "fsync, fdatasync"
_WRITTEN = "files made in storage"
_READ = "files read in storage"
_REMOVED = "files removed in storage"
_CALLS = "system calls"
_MESSAGES = "messages on the wire"
_CPU = "CPU ms"
_ORDER = (_FSYNC, _WRITTEN, _READ, _REMOVED, _MESSAGES, _CALLS, _CPU)

Counts = dict[str, float]


def system_calls(lines: Iterable[str], storage: str) -> Counts:
    """Count the calls of an `strace -f -y` log; `storage` is the directory whose files count as stored.

    A file appears in storage by a rename or a link, or is created there; it is read by an open that does not write.
    """
    counts: Counter[str] = Counter({_FSYNC: 0, _WRITTEN: 0, _READ: 0, _REMOVED: 0, _CALLS: 0})
    for line in lines:
        found = _CALL.match(line)  # a call that was interrupted in the log is resumed in a line that does not match
        if found is None:
            continue
        name, rest = found.groups()
        counts[_CALLS] += 1
        failed = rest.rstrip().endswith(")") and ") = -1 " in rest
        if name in ("fsync", "fdatasync"):
            counts[_FSYNC] += 1
        elif failed or storage not in rest:
            continue
        elif name in ("rename", "renameat", "renameat2", "link", "linkat"):
            counts[_WRITTEN] += 1
        elif name in ("unlink", "unlinkat") and "AT_REMOVEDIR" not in rest:
            counts[_REMOVED] += 1
        elif name in ("open", "openat", "openat2") and "O_DIRECTORY" not in rest and "O_PATH" not in rest:
            if "O_RDONLY" in rest:
                counts[_READ] += 1
            elif "O_CREAT" in rest and "O_TMPFILE" not in rest and "/.tmp-" not in rest:
                counts[_WRITTEN] += 1
    return dict(counts)


class _Bench:
    """Runs the driver on one checkout, with a storage and a cache that nobody else uses."""

    def __init__(self, source: Path, scratch: Path) -> None:
        self._source = source
        self._scratch = scratch
        self._number = 0

    def traced(self, scenario: str, count: int) -> Counts:
        """Everything but the CPU time of one run."""
        with self._directory() as directory:
            if scenario == "restore":
                self._run(directory, scenario, count)
            log = directory / "strace"
            self._run(directory, scenario, count, ["strace", "-f", "-y", "-qq", "-s", "256", "-o", str(log)])
            with log.open(errors="replace") as lines:
                counts = system_calls(lines, str(directory / "storage"))
            return {**counts, _MESSAGES: sum(_messages(directory).values())}

    def timed(self, scenario: str, count: int) -> Counts:
        """The CPU time of one run: the driver's and that of every process below it."""
        with self._directory() as directory:
            if scenario == "restore":
                self._run(directory, scenario, count)
            return {_CPU: 1000 * self._run(directory, scenario, count)}

    def requested(self, scenario: str, count: int) -> tuple[Counts, Counts]:
        """Requests to an S3 server by method, and messages by type."""
        with self._directory() as directory, _s3() as (uri, environment, requests):
            self._run(directory, scenario, count, storage=uri, environment=environment)
            return {method: float(number) for method, number in requests.items()}, _messages(directory)

    @contextmanager
    def _directory(self) -> Iterator[Path]:
        self._number += 1
        directory = self._scratch / str(self._number)
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory)

    def _run(
        self,
        directory: Path,
        scenario: str,
        count: int,
        wrapper: list[str] | None = None,
        *,
        storage: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> float:
        """CPU seconds of the run, its children included."""
        command = [*(wrapper or []), sys.executable, str(_DRIVER), scenario, str(count)]
        process = subprocess.Popen(
            [*command, storage or str(directory / "storage"), str(directory / "messages")],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(self._source / "src"), str(_ROOT)]),
                "HOLDFAST_LOCAL_CACHE_DIR": str(directory / "cache"),
                "HOLDFAST_QUIET": "1",
                **(environment or {}),
            },
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stderr.close()
        if process.returncode != 0:
            raise RuntimeError(f"{scenario} ended with {process.returncode}: {errors.decode(errors='replace')}")
        return usage.ru_utime + usage.ru_stime


def _messages(directory: Path) -> Counts:
    counts: Counts = json.loads((directory / "messages").read_text())
    return counts


@contextmanager
def _s3() -> Iterator[tuple[str, dict[str, str], Counter[str]]]:
    """An S3 server in this process: a storage path on it, its credentials, and its requests by method."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from tests.contract.moto_front import OneAtATime
    from tests.contract.servers import Server, aws_environment
    from werkzeug.serving import make_server

    requests: Counter[str] = Counter()

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        query = environ.get("QUERY_STRING", "")
        method = environ["REQUEST_METHOD"]
        listing = method == "GET" and "list-type" in query
        requests["LIST" if listing else method] += 1
        return front(environ, start_response)

    class Quiet(MotoRequestHandler):  # type: ignore[misc]
        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Nobody reads it."""

    front = OneAtATime(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        s3 = Server("s3", endpoint, aws_environment(), lambda name: s3.request("PUT", f"/{name}"))
        uri = s3.uri(s3.new_bucket(), "runs")  # a new one each time: moto's are the process's
        requests.clear()
        yield uri, dict(s3.environment), requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _each(many: Counts, few: Counts, more: int) -> Counts:
    return {key: (many.get(key, 0) - few.get(key, 0)) / more for key in sorted(many.keys() | few.keys())}


def _median(rounds: list[Counts]) -> Counts:
    keys = {key: None for one in rounds for key in one}
    return {key: statistics.median(one.get(key, 0) for one in rounds) for key in keys}


def _table(columns: dict[str, Counts], order: Iterable[str]) -> None:
    print("| | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for key in order:
        print(f"| {key} | " + " | ".join(_figure(counts.get(key)) for counts in columns.values()) + " |", flush=True)


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=_ROOT, help="the checkout whose src is counted")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts")
    parser.add_argument("--reports", type=int, default=20_000)
    parser.add_argument("--commits", type=int, default=40)
    options = parser.parse_args()
    if shutil.which("strace") is None:
        parser.error("strace is not installed: as root, apt-get install strace")
    # Not below /tmp where that is memory: fsync must mean something.
    with tempfile.TemporaryDirectory(prefix="counts-", dir=os.environ.get("TMPDIR", "/var/tmp")) as scratch:
        _print_all(_Bench(options.source.resolve(), Path(scratch)), options)


def _print_all(bench: _Bench, options: argparse.Namespace) -> None:
    def median(scenario: str, count: int) -> Counts:
        rounds = range(options.rounds)
        traced = _median([bench.traced(scenario, count) for _ in rounds])
        return {**traced, **_median([bench.timed(scenario, count) for _ in rounds])}

    noop = median("noop", 0)
    few_reports, many_reports = median("reports", _FEW), median("reports", _FEW + options.reports)
    few_commits, many_commits = median("commits", _FEW), median("commits", _FEW + options.commits)
    print("2 workers on one node, files on a local disk. A commit is of one file of 1 KiB, its report included;")
    print("the restart reads a checkpoint of 256 MiB.\n")
    _table(
        {
            "a run that does nothing": noop,
            "one report": _each(many_reports, few_reports, options.reports),
            "one commit": _each(many_commits, few_commits, options.commits),
            "a restart": median("restore", 0),
        },
        _ORDER,
    )
    few, few_messages = bench.requested("commits", _FEW)
    many, many_messages = bench.requested("commits", _FEW + options.commits)
    nothing, _ = bench.requested("noop", 0)
    requests = {"a run that does nothing": nothing, "one commit": _each(many, few, options.commits)}
    print("\nRequests to S3:\n")
    _table(requests, sorted({key for counts in requests.values() for key in counts}))
    messages = _each(many_messages, few_messages, options.commits)
    print("\nMessages of one commit: " + ", ".join(f"{key} {_figure(n)}" for key, n in messages.items() if n))


if __name__ == "__main__":
    main()
