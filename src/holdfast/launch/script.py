"""The script that is launched: fetched where it is a URI, and looked at: does it call `fit()`, or is it torchrun's?

A script "without a line of ours" imports nothing of holdfast; then it is a plain one. What a helper module imports is
not looked at: `--fit` and `--torchrun` say what the script's own text does not.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.storage.locate import open_store
from holdfast.storage.uri import is_uri, redact, split

__all__ = ["calls_holdfast", "fetch_script"]


def fetch_script(script: str, directory: Path) -> Path:
    """The script as a local file; one that is a URI is copied into `directory`."""
    if not is_uri(script):
        path = Path(script)
        if not path.is_file():
            raise ConfigError(
                f"There is no script {script}: give a path, a URI such as s3://bucket/main.py, or -m MODULE."
            )
        return path
    parent, name = split(script)
    if not name:
        raise ConfigError(f"{redact(script)} names no script: write s3://bucket/main.py.")
    store = open_store(parent)
    try:
        data = store.get(name)
    finally:
        store.close()
    path = directory / Path(name).name
    path.write_bytes(data)
    return path


def calls_holdfast(script: str, *, is_module: bool) -> bool:
    """Whether the script's own text imports holdfast."""
    path = _module_file(script) if is_module else Path(script)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"The script {path} cannot be read as Python: {error}.") from error
    return any(name.partition(".")[0] == "holdfast" for name in _imported(tree))


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _module_file(name: str) -> Path:
    """Found as `python -m` will: from the current directory first."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        raise ConfigError(f"There is no module {name} here: see sys.path, or leave -m out and give a path.")
    return Path(found.origin)
