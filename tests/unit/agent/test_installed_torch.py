"""Which torch is installed, without importing it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

_SAY = """
import sys
from holdfast.agent.installed_torch import installed_torch
print(installed_torch())
assert "torch" not in sys.modules and "importlib.metadata" not in sys.modules
"""


def _say(tmp_path: Path) -> str:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}){_SAY}"]
    return subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE, text=True).stdout.strip()


def test_the_version_of_torch_is_known_without_importing_it(tmp_path: Path) -> None:
    assert _say(tmp_path) == importlib.metadata.version("torch")


def test_the_version_of_a_torch_that_does_not_say_it_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    assert _say(tmp_path) == "None"
