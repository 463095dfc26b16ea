"""What checkpoints are compared with: `cp` and fsync, `rclone copy`, and `pyarrow.fs.copy_files`, which Ray uses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from bench.timing import settle

__all__ = ["arrow_copy", "arrow_s3", "cp", "fsync_tree", "rclone_copy", "sync_file_system"]


def cp(source: Path, target: Path) -> None:
    """`cp -r`."""
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)


def fsync_tree(directory: Path) -> None:
    """Make every file below, and every directory, durable."""
    for folder, _, names in os.walk(directory):
        for path in [*(Path(folder, name) for name in names), Path(folder)]:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def sync_file_system(directory: Path) -> None:
    """`sync -f`: everything on that file system at once."""
    settle(directory)


def arrow_copy(source: str, target: str, source_filesystem: object = None, target_filesystem: object = None) -> None:
    """`pyarrow.fs.copy_files`, as Ray Train calls it, with its default of 1 MiB chunks and all threads."""
    from pyarrow import fs

    local = fs.LocalFileSystem()
    if target_filesystem is None:
        Path(target).mkdir(parents=True)
    fs.copy_files(
        source,
        target,
        source_filesystem=source_filesystem or local,
        destination_filesystem=target_filesystem or local,
    )


def arrow_s3(endpoint: str, environment: Mapping[str, str]) -> object:
    """pyarrow's own S3 client for a server on this machine."""
    from pyarrow import fs

    return fs.S3FileSystem(
        endpoint_override=urlsplit(endpoint).netloc,
        scheme="http",
        region=environment["AWS_REGION"],
        access_key=environment["AWS_ACCESS_KEY_ID"],
        secret_key=environment["AWS_SECRET_ACCESS_KEY"],
    )


def rclone_copy(source: str, target: str, endpoint: str, environment: Mapping[str, str]) -> None:
    """`rclone copy` with its defaults; `peer:` in either place is the S3 server."""
    config = {
        "RCLONE_CONFIG": os.devnull,
        "RCLONE_CONFIG_PEER_TYPE": "s3",
        "RCLONE_CONFIG_PEER_PROVIDER": "Rclone",
        "RCLONE_CONFIG_PEER_ENDPOINT": endpoint,
        "RCLONE_CONFIG_PEER_ENV_AUTH": "true",
    }
    program = shutil.which("rclone", path=str(Path(sys.executable).parent)) or "rclone"
    command = [program, "copy", "--quiet", source, target]
    subprocess.run(command, check=True, env={**os.environ, **environment, **config})
