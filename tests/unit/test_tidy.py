"""Every module has a docstring, names in backticks exist, public names resolve, importing the API stays cheap."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.mentioned_names import ROOT, Project, code_files, holdfast_project

SOURCES = sorted((ROOT / "src").rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_every_module_has_a_docstring(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring and "TODO" not in docstring, f"{_name(path)} does not say why it exists"


def test_names_in_backticks_exist() -> None:
    """In docstrings and comments; `mentioned_names` says which are checked, and which belong to others."""
    project = holdfast_project()
    unknown = [f"{_name(path)}:{line}: `{name}`" for path in code_files() for line, name in project.unknown(path)]
    assert not unknown, "\n".join(["nothing has these names:", *unknown])


def test_a_name_that_nothing_has_is_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""`Known.method`, `module.function`, `json.dumps`, `argument`, `a b`; not `Known.gone`, `lost`."""\n'
        "class Known:\n    def method(self): ...\n"
        "def function(argument): ...  # calls `module.moved` and `len()`\n"
    )
    found = Project({module: "package.module"}, set()).unknown(module)
    assert found == [(1, "Known.gone"), (1, "lost"), (4, "module.moved")]


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

    ours, yardstick = zip(
        *((imported("holdfast.train, holdfast.tune"), imported("asyncio")) for _ in range(6)), strict=True
    )
    heavy = {"torch", "pyarrow", "ray", "rich", "optuna", "starlette", "uvicorn", "obstore", "numpy", "pandas"}
    assert not [roots & heavy for _, roots in ours if roots & heavy]
    assert min(cost_s for cost_s, _ in ours) < min(cost_s for cost_s, _ in yardstick)


def test_public_names_resolve() -> None:
    import holdfast.train as train
    import holdfast.train.torch as train_torch
    from holdfast import air, tune

    for module in (train, train_torch, tune, air):
        for name in module.__all__:
            assert getattr(module, name) is not None
        assert set(module.__all__) <= set(dir(module))
