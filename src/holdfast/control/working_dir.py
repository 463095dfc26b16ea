"""Packing the driver's code for agents on other machines: the directory of the script, or the one that was given.

A training function from the script itself travels by value, but the modules beside it are imported by name. Left out
are what tools make, logs, what the `.gitignore` of the directory names, and runs that are stored in it. Agents that the
local engine starts share the disk, and get nothing.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from holdfast.errors import ConfigError
from holdfast.rendezvous.directory import RENDEZVOUS_FILE

__all__ = ["IgnoreRules", "PackedDirectory", "find_working_dir", "pack_directory"]

_LIMIT_VARIABLE = "HOLDFAST_WORKING_DIR_LIMIT_BYTES"
_LIMIT_BYTES = 100 * 1024 * 1024
_LARGEST_TOLD = 3
_FILES_TOLD_OF = 100_000
"""Of a directory that is too large, so many files are looked at to say what is large in it."""
_ALWAYS_IGNORED = (
    *(".git/", ".hg/", ".svn/", "__pycache__/", "*.pyc", ".venv/", "venv/", "node_modules/"),
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".tox/", ".nox/", ".ipynb_checkpoints/", ".eggs/"),
    # Logs of drivers grow while these run: zygotes would be of no use to the next driver, whose code had another hash.
    *("*.log", "nohup.out", "slurm-*.out"),
)
_RUN_FILES = ("run.json", ".manifest.json", RENDEZVOUS_FILE)
"""A directory that holds one of these is a run of ours, a checkpoint, or a rendezvous."""


@dataclass(frozen=True, slots=True)
class PackedDirectory:
    """A directory in an archive (tar, gzip)."""

    root: str
    """Where it lies on the driver's machine."""
    archive: bytes
    hash: str


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    anchored: bool
    directories_only: bool
    ignore: bool


class IgnoreRules:
    """Patterns as in a `.gitignore`: `*.bin`, `data/`, `/only/here`, `!but/this`. The last one that matches decides."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._rules = [rule for one in patterns if (rule := _parse(one)) is not None]

    def ignores(self, path: str, *, is_directory: bool) -> bool:
        """Whether this path below the root is left out."""
        ignored = False
        for rule in self._rules:
            if rule.directories_only and not is_directory:
                continue
            subject = path if rule.anchored else path.rpartition("/")[2]
            if rule.pattern.match(subject):
                ignored = rule.ignore
        return ignored


def _parse(line: str) -> _Rule | None:
    text = line.strip()
    if not text or text.startswith("#"):
        return None
    ignore = not text.startswith("!")
    text = text.removeprefix("!")
    directories_only = text.endswith("/")
    text = text.rstrip("/")
    anchored = "/" in text
    text = text.removeprefix("/").removeprefix("**/") if text.startswith("/") else text
    if text.startswith("**/"):
        text, anchored = text.removeprefix("**/"), "/" in text.removeprefix("**/")
    return _Rule(re.compile(translate(text)), anchored, directories_only, ignore) if text else None


def find_working_dir(given: str | None) -> Path | None:
    """The directory to send: the given one, or the script's; "" is none."""
    if given == "":
        return None
    if given is not None:
        root = Path(os.path.abspath(os.path.expanduser(given)))  # noqa: PTH100, PTH111
        if not root.is_dir():
            raise ConfigError(
                f'runtime_env["working_dir"] must be a directory of this machine, but {given!r} is none; give another, '
                'or "" to send none.'
            )
        return root
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is None or _is_installed(os.path.realpath(file)):
        return Path.cwd()  # a notebook, an interactive session, or a command that runs the user's code
    spec = getattr(main, "__spec__", None)
    above = 0 if spec is None else spec.name.count(".")  # `python -m package.module` is found from the package's parent
    return Path(os.path.abspath(file)).parents[above]  # noqa: PTH100


def _is_installed(file: str) -> bool:
    """Whether a file belongs to a package or a command, rather than to the user."""
    if any(part in ("site-packages", "dist-packages") for part in Path(file).parts):
        return True  # of this environment, of the user, or of another one that this is layered on
    places = map(sysconfig.get_path, ("stdlib", "platstdlib", "scripts"))
    return any(file.startswith(os.path.realpath(place) + os.sep) for place in places)


def pack_directory(root: Path, excludes: Sequence[str], storage_path: str) -> PackedDirectory:
    """Pack a directory, without what is ignored; `ConfigError` where it is larger than the limit. Equal files give an
    equal hash."""
    buffer = io.BytesIO()
    limit_bytes = _limit_bytes()
    sizes: dict[str, int] = {}
    total_bytes = 0
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path, name, size_bytes in _files(root, _rules(root, excludes), storage_path):
            sizes[name] = size_bytes
            total_bytes += size_bytes
            if total_bytes <= limit_bytes:
                _add(archive, path, name)
            elif len(sizes) > _FILES_TOLD_OF:
                break
    if total_bytes > limit_bytes:
        raise ConfigError(_describe_excess(root, sizes, limit_bytes))
    data = buffer.getvalue()
    return PackedDirectory(str(root), data, blake3(data).hexdigest())


def _limit_bytes() -> int:
    text = os.environ.get(_LIMIT_VARIABLE)
    if text is None:
        return _LIMIT_BYTES
    if not text.isdecimal():
        raise ConfigError(f"{_LIMIT_VARIABLE} must be a whole number of bytes, not {text!r}.")
    return int(text)


def _rules(root: Path, excludes: Sequence[str]) -> IgnoreRules:
    given: list[str] = []
    for name in (".gitignore", ".rayignore"):
        if (root / name).is_file():
            given += (root / name).read_text(errors="replace").splitlines()
    return IgnoreRules([*_ALWAYS_IGNORED, *given, *excludes])


def _files(root: Path, rules: IgnoreRules, storage_path: str) -> Iterator[tuple[Path, str, int]]:
    """Path, name in the archive, and size of each file, in a fixed order. Links to files are followed."""
    storage = os.path.realpath(storage_path)
    for directory, below, names in os.walk(root):
        here = Path(directory).relative_to(root)
        below[:] = sorted(
            name
            for name in below
            if not rules.ignores((here / name).as_posix(), is_directory=True)
            and os.path.realpath(Path(directory, name)) != storage
            and not any(Path(directory, name, one).exists() for one in _RUN_FILES)
        )
        for name in sorted(names):
            path, relative = Path(directory, name), (here / name).as_posix()
            if rules.ignores(relative, is_directory=False):
                continue
            try:
                found = path.stat()
            except OSError:
                continue  # a dangling link, or gone
            if stat.S_ISREG(found.st_mode):
                yield path, relative, found.st_size


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be sent to other machines: {error.strerror}; name it in .gitignore, or in "
            'runtime_env["excludes"].'
        ) from error
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
    archive.addfile(entry, io.BytesIO(data))


def _describe_excess(root: Path, sizes: dict[str, int], limit_bytes: int) -> str:
    entries: dict[str, int] = {}
    for name, size_bytes in sizes.items():
        entry = name.partition("/")[0]
        entries[entry] = entries.get(entry, 0) + size_bytes
    largest = sorted(entries.items(), key=lambda one: -one[1])[:_LARGEST_TOLD]
    told = ", ".join(f"{name} ({_size(size_bytes)})" for name, size_bytes in largest)
    return (
        f"The working directory {root} has {_size(sum(sizes.values()))}, more than the {_size(limit_bytes)} that are "
        f"sent to other machines ({_LIMIT_VARIABLE}), the most in {told}: name these in .gitignore, or in "
        'RunConfig(worker_runtime_env={"excludes": [...]}), or give another "working_dir" there.'
    )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"
