"""AWS profiles in ~/.aws, which obstore itself does not read.

Only plain values are used, and `credential_process`: keys, token, region and endpoint of
AWS_PROFILE (or `default`). Roles and single sign-on are not supported here. `ProfileCredentials` reads the keys
again and again, since tools renew them during a run.
"""

from __future__ import annotations

import configparser
import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

__all__ = ["Profile", "ProfileCredentials", "read_profile"]

_CLIENT_MARGIN = timedelta(minutes=5)
"""obstore asks for new credentials this long before the old ones expire."""
_REREAD = timedelta(seconds=1)
_PROCESS_MARGIN = timedelta(minutes=1)
_PROCESS_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile; None where it has no value."""

    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    credential_process: str | None = field(default=None, repr=False)
    """A command that prints credentials as JSON."""
    region: str | None = None
    endpoint_url: str | None = None


def read_profile(environment: Mapping[str, str]) -> Profile:
    """The profile that the environment chooses; an empty one where there are no such files."""
    name = environment.get("AWS_PROFILE") or "default"
    credentials = _section(environment.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials", name)
    # In the configuration every profile but the default one is called "profile <name>".
    config = _section(
        environment.get("AWS_CONFIG_FILE") or "~/.aws/config", name if name == "default" else f"profile {name}"
    )
    found = {**config, **credentials}
    return Profile(
        access_key_id=found.get("aws_access_key_id"),
        secret_access_key=found.get("aws_secret_access_key"),
        session_token=found.get("aws_session_token"),
        credential_process=found.get("credential_process"),
        region=found.get("region"),
        endpoint_url=found.get("endpoint_url"),
    )


class _Credentials(msgspec.Struct, frozen=True):
    """What a `credential_process` prints: the format is that of the AWS command line."""

    AccessKeyId: str
    SecretAccessKey: str
    SessionToken: str | None = None
    Expiration: datetime | None = None


class ProfileCredentials:
    """The credentials of a profile as they are now, in the form in which obstore asks for them.

    Files are read again every second; a `credential_process` is run again a minute before its answer expires.
    """

    def __init__(self, environment: Mapping[str, str], now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        names = ("AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")
        self._environment = {name: environment[name] for name in names if name in environment}
        self._now = now
        self._lock = threading.Lock()
        self._answer: _Credentials | None = None

    def __call__(self) -> dict[str, Any]:
        profile = read_profile(self._environment)
        if profile.access_key_id and profile.secret_access_key:
            found = _Credentials(profile.access_key_id, profile.secret_access_key, profile.session_token)
        elif profile.credential_process:
            found = self._run(profile.credential_process)
        else:
            # obstore quotes this; it ends up as `AccessDenied` with the names of the variables.
            raise ValueError("MissingCredential: the AWS profile holds no keys any more")
        return {
            "access_key_id": found.AccessKeyId,
            "secret_access_key": found.SecretAccessKey,
            "token": found.SessionToken,
            "expires_at": self._now() + _CLIENT_MARGIN + _REREAD,
        }

    def _run(self, command: str) -> _Credentials:
        with self._lock:
            known = self._answer
            if known is not None and (known.Expiration is None or known.Expiration - self._now() > _PROCESS_MARGIN):
                return known
            try:
                done = subprocess.run(
                    shlex.split(command),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_PROCESS_TIMEOUT_S,
                    check=False,
                )
                if done.returncode:
                    raise ValueError(f"MissingCredential: credential_process ended with code {done.returncode}")
                self._answer = msgspec.json.decode(done.stdout, type=_Credentials)
            except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
                raise ValueError(f"MissingCredential: credential_process failed ({type(error).__name__})") from None
            return self._answer


def _section(path: str, name: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(os.path.expanduser(path), encoding="utf-8")  # noqa: PTH111  pathlib's raises without a home
    except (configparser.Error, UnicodeDecodeError, OSError):
        return {}
    return dict(parser[name]) if parser.has_section(name) else {}
