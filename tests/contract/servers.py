"""Real servers for the storage tests: each starts on a free loopback port and is gone when its `with` ends.

moto (`moto_front`) obeys put-if-absent, `rclone serve s3` ignores it and answers success, so between them both kinds
of S3 server are met. `azurite-blob` is Azure's own emulator. Google's is `gcs_front`, which says what of it is
emulated. `rclone mount` gives a FUSE file system. Fixtures in `tests/conftest.py` share each server among the tests of
one process; benchmarks use these context managers directly.

Every server is started through `setpriv --pdeathsig`, so that none outlives a test process that was killed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

__all__ = [
    "AWS_SECRETS",
    "AZURE_SECRETS",
    "Server",
    "aws_environment",
    "azurite",
    "fuse_mount",
    "gcs",
    "moto",
    "rclone_s3",
    "serving",
    "unused_port",
]

_START_TIMEOUT_S = 120
_STOP_TIMEOUT_S = 10
_REPOSITORY = Path(__file__).resolve().parents[2]
_ENVIRONMENT = dict(os.environ)
"""As it was before any test changed it: a server may serve many tests."""
_AZURITE = Path("node_modules/.bin/azurite-blob")
_ACCESS_KEY = "holdfast-test-access-key-0001"  # rclone refuses very short ones
_SECRET_KEY = "holdfast-test-secret-key-0001"
_AZURE_ACCOUNT = "devstoreaccount1"  # Azurite's own, published account and key
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

AWS_SECRETS = (_ACCESS_KEY, _SECRET_KEY)
AZURE_SECRETS = (_AZURE_KEY,)
"""What must never be shown."""


@dataclass(frozen=True, slots=True)
class Server:
    """One running server: where it is, the variables that hold its credentials, and how to make a bucket."""

    scheme: str
    endpoint: str
    environment: Mapping[str, str]
    make_bucket: Callable[[str], None]

    def new_bucket(self) -> str:
        """Make a bucket (or container) with a unique name."""
        name = f"holdfast-{uuid.uuid4().hex[:12]}"
        self.make_bucket(name)
        return name

    def request(self, method: str, path: str) -> None:
        """One plain request, unsigned, for what no client would send."""
        _request(self.endpoint, method, path)

    def uri(self, bucket: str, prefix: str = "") -> str:
        """The storage path of a bucket on this server, without credentials."""
        where = f"{self.scheme}://{bucket}/{prefix}".rstrip("/")
        return f"{where}?endpoint_override={quote(self.endpoint, safe='')}"


@contextmanager
def serving(
    command: Sequence[str], ready: str, environment: Mapping[str, str] | None = None
) -> Iterator[re.Match[str]]:
    """Run a command until the `with` ends; yields the match of `ready` in what it printed once it was there."""
    with _running(command, environment or {}, ready) as output:
        found = output.wait_until_ready()
        try:
            yield found
        finally:
            output.expect_alive()


@contextmanager
def _running(command: Sequence[str], environment: Mapping[str, str], ready: str = "(?!)") -> Iterator[_Output]:
    setpriv = shutil.which("setpriv")
    leash = [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []
    process = subprocess.Popen(
        [*leash, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**_ENVIRONMENT, "PYTHONUNBUFFERED": "1", **environment},
        text=True,
        errors="replace",
    )
    output = _Output(process, re.compile(ready))
    try:
        yield output
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.finish()


class _Output:
    """Reads a process's output to its end, so that it never blocks on a full pipe, and searches it for one line."""

    def __init__(self, process: subprocess.Popen[str], ready: re.Pattern[str]) -> None:
        self._process = process
        self._ready = ready
        self._found: re.Match[str] | None = None
        self._settled = threading.Event()
        self._last: deque[str] = deque(maxlen=50)
        self._thread = threading.Thread(target=self._read, name="server-output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last.append(line)
            if self._found is None and (found := self._ready.search(line)):
                self._found = found
                self._settled.set()
        self._settled.set()

    def wait_until_ready(self) -> re.Match[str]:
        self._settled.wait(_START_TIMEOUT_S)
        if self._found is None:
            raise self._failure("did not start")
        return self._found

    def wait_for(self, told: socket.socket) -> None:
        """Wait until the socket is readable; raise if the process ends before."""
        ended = os.pidfd_open(self._process.pid)
        try:
            if told.fileno() not in select.select([told.fileno(), ended], [], [], _START_TIMEOUT_S)[0]:
                raise self._failure("did not start")
        finally:
            os.close(ended)

    def expect_alive(self) -> None:
        """Raise, with the last lines of output, if the server has ended by itself."""
        if (code := self._process.poll()) is not None:
            raise self._failure(f"ended by itself with code {code}")

    def _failure(self, how: str) -> RuntimeError:
        if self._process.poll() is not None:
            self._thread.join(_STOP_TIMEOUT_S)  # its last words may be on their way
        return RuntimeError(f"{self._process.args!r} {how}:\n{''.join(self._last)}")

    def finish(self) -> None:
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def unused_port() -> Iterator[int]:
    """A port at which nobody listens, nor can before the `with` ends: it is bound here."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def _request(
    endpoint: str, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> None:
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=30)
    try:
        connection.request(method, path, body=body, headers={"Content-Length": str(len(body)), **(headers or {})})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path} was answered with {answer.status}: {text!r}")
    finally:
        connection.close()


def _script(name: str) -> str:
    """A console script of this interpreter's environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: pip install -e '.[dev]'")
    return found


def aws_environment() -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        # pyarrow's client otherwise sends a trailing checksum that rclone takes for part of the object.
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }


@contextmanager
def moto() -> Iterator[Server]:
    """An S3 server that obeys put-if-absent, by `moto_front`; about 20 MiB/s."""
    front = Path(__file__).with_name("moto_front.py")
    with serving([sys.executable, "-W", "ignore", str(front)], r"Running on (http://[\d.:]+)") as found:
        endpoint = found.group(1)
        yield Server("s3", endpoint, aws_environment(), lambda name: _request(endpoint, "PUT", f"/{name}"))


@contextmanager
def rclone_s3(root: Path) -> Iterator[Server]:
    """An S3 server on the directory `root` that answers success to every put-if-absent.

    It caches directories, so `root` is to be changed through it alone. Without a cache of files (`off`), a read that
    meets an overwrite breaks off, or gets as much of the new object as the old one was long; with one, it would return
    a mixture of old and new.
    """
    rclone, configured = _script("rclone"), ("--config", os.devnull)
    credentials = ("--auth-key", f"{_ACCESS_KEY},{_SECRET_KEY}", "--vfs-cache-mode", "off")
    command = [rclone, "serve", "s3", "--addr", "127.0.0.1:0", *configured, *credentials, str(root)]
    with serving(command, r"Starting s3 server on \[(http://[\d.:]+)/\]") as found:
        endpoint = found.group(1)
        client = {
            "RCLONE_S3_PROVIDER": "Rclone",
            "RCLONE_S3_ENDPOINT": endpoint,
            "RCLONE_S3_ACCESS_KEY_ID": _ACCESS_KEY,
            "RCLONE_S3_SECRET_ACCESS_KEY": _SECRET_KEY,
        }

        def make_bucket(name: str) -> None:
            subprocess.run([rclone, "mkdir", f":s3:{name}", *configured], env={**_ENVIRONMENT, **client}, check=True)

        yield Server("s3", endpoint, aws_environment(), make_bucket)


@contextmanager
def azurite() -> Iterator[Server]:
    """Azure's blob emulator, in memory; `tools/install-servers.sh` installs it."""
    program = _REPOSITORY / ".cache" / "azurite" / _AZURITE
    if not program.exists():
        raise RuntimeError("azurite is not installed: run tools/install-servers.sh")
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    command = [str(program), *options, "--blobHost", "127.0.0.1", "--blobPort", "0"]
    environment = {"AZURE_STORAGE_ACCOUNT_NAME": _AZURE_ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": _AZURE_KEY}
    with serving(command, r"successfully listens on (http://[\d.:]+)") as found:
        address = found.group(1)
        yield Server("az", f"{address}/{_AZURE_ACCOUNT}", environment, lambda name: _make_container(address, name))


def _make_container(address: str, name: str) -> None:
    """Ask for a container, signed with the account's shared key: obstore makes none."""
    date = formatdate(usegmt=True)
    resource = f"/{_AZURE_ACCOUNT}/{_AZURE_ACCOUNT}/{name}\nrestype:container"
    to_sign = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:2021-08-06\n{resource}"
    digest = hmac.new(base64.b64decode(_AZURE_KEY), to_sign.encode(), hashlib.sha256).digest()
    signature = base64.b64encode(digest).decode()
    headers = {
        "x-ms-date": date,
        "x-ms-version": "2021-08-06",
        "Authorization": f"SharedKey {_AZURE_ACCOUNT}:{signature}",
    }
    _request(address, "PUT", f"/{_AZURE_ACCOUNT}/{name}?restype=container", headers=headers)


@contextmanager
def gcs() -> Iterator[Server]:
    """`gcp-storage-emulator` behind the XML front of `gcs_front`."""
    front = Path(__file__).with_name("gcs_front.py")
    with serving([sys.executable, "-W", "ignore", str(front)], r"serving (http://[\d.:]+)") as found:
        endpoint = found.group(1)

        def make_bucket(name: str) -> None:
            body = json.dumps({"name": name}).encode()
            _request(endpoint, "POST", "/storage/v1/b", body, {"Content-Type": "application/json"})

        yield Server("gs", endpoint, {"STORAGE_EMULATOR_HOST": endpoint}, make_bucket)


@contextmanager
def fuse_mount(backing: Path, mountpoint: Path, cache_time: str = "1s") -> Iterator[Path]:
    """A FUSE mount of the directory `backing`, by rclone; a file is stored when `close` returns. What others do in
    `backing` is seen after `cache_time` at the latest.

    rclone tells the socket of `NOTIFY_SOCKET` when the mount is there, so nothing has to poll for it. The socket's
    name is one that the kernel makes up: a path may be too long for a socket.
    """
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("this user may not open /dev/fuse, so nothing can be mounted")
    for directory in (backing, mountpoint):
        directory.mkdir(parents=True, exist_ok=True)
    command = [
        *(_script("rclone"), "mount", str(backing), str(mountpoint), "--config", os.devnull),
        *("--vfs-cache-mode", "off", "--dir-cache-time", cache_time, "--attr-timeout", cache_time),
        *("--cache-dir", str(mountpoint.with_name(mountpoint.name + ".cache")), "--verbose"),
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind("")
        name = "@" + ready.getsockname()[1:].decode()
        with _running(command, {"NOTIFY_SOCKET": name}) as output:
            output.wait_for(ready)
            try:
                yield mountpoint
            finally:
                subprocess.run(["fusermount3", "-u", "-z", str(mountpoint)], check=True)
