"""What `aws configure` wrote to ~/.aws: obstore itself does not read those files.

Only what stands in them as plain text is used: keys, token, region and endpoint of AWS_PROFILE (or `default`). Roles
and single sign-on are left to the environment's own means. Neighbour: `objects_uri` asks.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Profile", "read_profile"]


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile; None where it says nothing."""

    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
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
        region=found.get("region"),
        endpoint_url=found.get("endpoint_url"),
    )


def _section(path: str, name: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(os.path.expanduser(path), encoding="utf-8")  # noqa: PTH111  pathlib's raises without a home
    except (configparser.Error, UnicodeDecodeError, OSError):
        return {}
    return dict(parser[name]) if parser.has_section(name) else {}
