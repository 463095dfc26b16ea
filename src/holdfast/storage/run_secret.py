"""The run secret of a user: one for all hubs and agents that use the same state directory.

It lies in `<state directory>/secret`, of mode 0600, and is made by the first driver that needs it. So it stays the same
when a driver is started again, an agent on the same machine (or with the same home) finds it by itself, and so does the
command line. HOLDFAST_TOKEN, or a file that HOLDFAST_TOKEN_FILE names, takes its place where they are set. It is never
in a run's storage, whose readers would gain the right to run code on the hosts, nor on a command line.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.storage.private_directory import make_private_directory
from holdfast.storage.state_dir import state_dir

__all__ = [
    "FILE_VARIABLE",
    "SECRET_VARIABLE",
    "find_secret",
    "make_secret",
    "open_secret",
    "read_secret_file",
    "secret_path",
]

SECRET_VARIABLE = "HOLDFAST_TOKEN"
FILE_VARIABLE = "HOLDFAST_TOKEN_FILE"


def make_secret() -> str:
    """A fresh secret, as text that fits into an environment variable."""
    return secrets.token_urlsafe(32)


def secret_path() -> Path:
    """Where this user's secret is kept, unless a variable says otherwise."""
    if given := os.environ.get(FILE_VARIABLE, "").strip():
        return Path(os.path.expanduser(given))  # noqa: PTH111
    return state_dir() / "secret"


def find_secret() -> str | None:
    """The secret that is there: the variable's, the given file's, or the state directory's; None without any."""
    if given := os.environ.get(SECRET_VARIABLE, "").strip():
        return given
    path = secret_path()
    if FILE_VARIABLE not in os.environ and not path.exists():
        return None
    return read_secret_file(path)


def open_secret() -> str:
    """As `find_secret`; one is made in the state directory where there is none."""
    found = find_secret()
    if found is not None:
        return found
    path = secret_path()
    try:
        _create(path, make_secret())
    except OSError as error:
        raise ConfigError(
            f"The run secret cannot be kept in {path}: {error.strerror}; set HOLDFAST_STATE_DIR to another one."
        ) from error
    return read_secret_file(path)


def read_secret_file(path: Path) -> str:
    """The secret in a file, which nobody else may read."""
    try:
        with path.open() as file:
            found = os.fstat(file.fileno())
            if found.st_mode & 0o077 or found.st_uid not in (os.getuid(), 0):
                raise ConfigError(f"The token file {path} may be read by others: run chmod 600 {path}.")
            secret = file.read().strip()
    except OSError as error:
        raise ConfigError(f"The token file {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"The token file {path} does not hold text: write the run secret to it.") from error
    if not secret:
        raise ConfigError(f"The token file {path} is empty: write the run secret to it, or remove it.")
    return secret


def _create(path: Path, secret: str) -> None:
    """Make the file with all that is in it at once; whoever was faster is left alone."""
    make_private_directory(path.parent)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(f"{secret}\n")
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
