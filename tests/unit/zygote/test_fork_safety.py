"""Libraries that start threads at import do not start them in the zygote."""

from __future__ import annotations

import subprocess
import sys

import pytest

_IMPORT = """
import importlib
from holdfast.zygote.fork_safety import one_thread_each, unsafe_reason
with one_thread_each():
    importlib.import_module({module!r})
print(unsafe_reason("Importing {module}"))
"""


@pytest.mark.parametrize("module", ["numpy", "pyarrow", "pandas"])
def test_importing_a_library_keeps_the_process_safe_to_fork(module: str) -> None:
    program = _IMPORT.format(module=module)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "None"
