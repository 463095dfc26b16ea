"""The layout stays honest: sizes, names, public names, and what an import costs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
EVERYTHING = sorted(path for top in ("src", "tests", "bench", "examples") for path in (ROOT / top).rglob("*.py"))
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", EVERYTHING, ids=_name)
def test_files_and_functions_fit_in_a_head(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES, f"{_name(path)} is too long: find its seam"
    assert path.stem not in FORBIDDEN_NAMES, f"{_name(path)} has a name that says nothing"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{_name(path)}: {node.name} has {length} lines"
        if isinstance(node, ast.ClassDef):
            assert not node.name.endswith("Manager"), f"{_name(path)}: {node.name} says nothing"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_modules_say_why_and_name_their_public_names(path: Path) -> None:
    tree = ast.parse(path.read_text())
    docstring = ast.get_docstring(tree)
    assert docstring and "TODO" not in docstring, f"{_name(path)} does not say why it exists"
    defined = _public_names(tree)
    declared = _declared_names(tree)
    if path.name in ("__init__.py", "__main__.py"):
        return
    assert declared is not None, f"{_name(path)} has no __all__"
    assert set(declared) == defined, f"{_name(path)}: __all__ and the public names differ"
    assert len(declared) == len(set(declared))


def _public_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def _declared_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            value = ast.literal_eval(node.value)
            assert isinstance(value, list)
            return value
    return None


def test_importing_the_api_is_nearly_free(tmp_path: Path) -> None:
    """It costs less than a part of the standard library, measured by the same means at the same time: seconds mean
    something else on every machine. CPU time, the best of several tries, and all of it compiled beforehand: wall time
    says nothing on a busy machine, and the cost of compiling nothing about the cost of importing."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)

    def imported(module: str) -> tuple[float, set[str]]:
        program = (
            f"import json, sys, time; began = time.process_time(); import {module};"
            "print(json.dumps([time.process_time() - began, sorted(sys.modules)]))"
        )
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        cost_s, modules = json.loads(done.stdout)
        return cost_s, {module.partition(".")[0] for module in modules}

    ours, yardstick = zip(*((imported("holdfast.train"), imported("asyncio")) for _ in range(6)), strict=True)
    heavy = {"torch", "pyarrow", "ray", "rich", "optuna", "starlette", "uvicorn", "obstore", "numpy", "pandas"}
    assert not [roots & heavy for _, roots in ours if roots & heavy]
    assert min(cost_s for cost_s, _ in ours) < min(cost_s for cost_s, _ in yardstick)


def test_public_names_resolve() -> None:
    import holdfast.train as train
    import holdfast.train.torch as train_torch

    for module in (train, train_torch):
        for name in module.__all__:
            assert getattr(module, name) is not None
        assert set(module.__all__) <= set(dir(module))
