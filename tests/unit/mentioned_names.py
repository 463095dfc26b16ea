"""Find names in backticks, in docstrings and comments, that nothing has: they were renamed, moved or misspelt.

What reads as a name is checked: identifiers joined by dots, perhaps with `()` behind. A plain name must be defined
somewhere in the project, be used as an identifier in the same file, or belong to Python. In a dotted name each part
must belong to the one before it: to a module its own names, to a class its attributes and methods.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import io
import keyword
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "Mention", "Project", "code_files", "holdfast_project"]

ROOT = Path(__file__).parents[2]

_FOREIGN = frozenset(
    [
        "torch",
        "numpy",
        "pyarrow",
        "obstore",
        "ray",
        "fsspec",
        "s3fs",
        "cloudpickle",
        "msgspec",
        "pandas",
        "safetensors",
        "tensorboard",
        "cryptography",
        "lightning",
        "transformers",
        "accelerate",
        "xgboost",
        "lightgbm",
        "jax",
        "matplotlib",
        "optuna",
        "gcsfuse",
        "rclone",
        "moto_server",
        "S3FileSystem",
        "Tensor",
    ]
)
"""Libraries, programs and their classes; what follows a dot after these is not checked."""

_LINUX = frozenset(["flock", "ps", "top", "sendall", "memory.limit_in_bytes", "memory.max", "memory.high"])
"""Programs, calls and files of the system."""

_PYTHON = frozenset(
    [*keyword.kwlist, *dir(builtins), *sys.stdlib_module_names, "__file__", "sitecustomize", "preexec_fn"]
)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?\Z")
_FILE = re.compile(r"\.(py|jsonl?|csv|txt|md|pt|toml|log|npz|bin|safetensors)\Z")
_COMMENT_WITH_SPAN = re.compile(r"#.*`")


class Mention(NamedTuple):
    line: int
    name: str


class Project:
    """The names that the files of a project define and use, and those that they mention."""

    def __init__(self, files: Mapping[Path, str], settings: set[str]) -> None:
        """`files` maps each file to the dotted name of its module; `settings` are names outside of code that count."""
        self._texts = {path: path.read_text() for path in files}
        self._nodes = {path: list(ast.walk(ast.parse(text))) for path, text in self._texts.items()}
        self._members: dict[str, set[str]] = defaultdict(set)
        """By the last part of a module's or a class's name: what may stand behind a dot after it."""
        self._bases: dict[str, set[str]] = defaultdict(set)
        for path, module in files.items():
            parts = module.split(".")
            for parent, child in pairwise(parts):
                self._members[parent].add(child)
            tree, *nodes = self._nodes[path]
            assert isinstance(tree, ast.Module)
            self._members[parts[-1]] |= _bound(tree.body)
            for node in nodes:
                if isinstance(node, ast.ClassDef):
                    self._members[node.name] |= _bound(node.body) | _assigned_attributes(node)
                    self._bases[node.name] |= {ast.unparse(base).split(".")[-1] for base in node.bases}
        self._defined = settings.union(self._members, *self._members.values())

    def unknown(self, path: Path) -> list[Mention]:
        """The names that this file mentions and that nothing has."""
        here = _identifiers(self._nodes[path])
        return [mention for mention in self._mentions(path) if not self._knows(mention.name, here)]

    def has(self, name: str) -> bool:
        """Whether the project itself defines this name, which may be dotted."""
        head, *rest = name.split(".")
        return head in self._defined and self._resolves(head, rest)

    def _mentions(self, path: Path) -> Iterator[Mention]:
        for node in self._nodes[path]:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                yield from _names_in(str(node.value.value), node.lineno)
        if _COMMENT_WITH_SPAN.search(self._texts[path]):
            for token in tokenize.generate_tokens(io.StringIO(self._texts[path]).readline):
                if token.type == tokenize.COMMENT:
                    yield from _names_in(token.string, token.start[0])

    def _knows(self, name: str, here: set[str]) -> bool:
        head, *rest = name.split(".")
        if head in _FOREIGN or name in _LINUX:
            return True
        if not rest:
            return head in self._defined or head in here or head in _PYTHON
        if head in self._members and self._resolves(head, rest):
            return True
        if head in sys.stdlib_module_names:
            return _in_library(head, rest)
        return (head in here or head in _PYTHON) and all(part in self._defined or part in here for part in rest)

    def _resolves(self, head: str, rest: list[str]) -> bool:
        if not rest:
            return True
        if head not in self._members:  # a value: its class is not known here
            return rest[0] in self._defined
        return rest[0] in self._members_of(head) and self._resolves(rest[0], rest[1:])

    def _members_of(self, name: str) -> set[str]:
        bases = [base for base in self._bases[name] if base in self._members and base != name]
        return self._members[name].union(*map(self._members_of, bases))


def code_files() -> list[Path]:
    """All Python files of this repository."""
    return [path for top in ("src", "tests", "bench", "examples") for path in sorted((ROOT / top).rglob("*.py"))]


@functools.cache
def holdfast_project() -> Project:
    """This repository, with the extras and markers that pyproject.toml defines."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    markers = {line.partition(":")[0] for line in settings["tool"]["pytest"]["ini_options"]["markers"]}
    extras = set(settings["project"]["optional-dependencies"])
    return Project({path: _module_name(path) for path in code_files()}, markers | extras)


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _names_in(text: str, line: int) -> Iterator[Mention]:
    for found in _SPAN.finditer(text):
        name = found.group(1)
        if _NAME.match(name) and not _FILE.search(name):
            yield Mention(line + text.count("\n", 0, found.start()), name.removesuffix("()"))


def _bound(body: list[ast.stmt]) -> set[str]:
    """The names that these statements bind, imports included."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            names |= _bound(node.body) | _bound(getattr(node, "orelse", []))
    return names


def _assigned_attributes(node: ast.ClassDef) -> set[str]:
    return {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)}


def _identifiers(nodes: list[ast.AST]) -> set[str]:
    """Every identifier in a file: variables, parameters, attributes, imports, and strings that could be one."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            names.add(node.arg or "")
        elif isinstance(node, ast.alias):
            names |= set((node.asname or node.name).split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names


def _in_library(module: str, rest: list[str]) -> bool:
    """Whether the standard library has this name."""
    found: object = importlib.import_module(module)
    for part in rest:
        if not hasattr(found, part):
            try:
                importlib.import_module(f"{module}.{part}")
            except ImportError:
                return False
        found = getattr(found, part)
        module = f"{module}.{part}"
    return True
