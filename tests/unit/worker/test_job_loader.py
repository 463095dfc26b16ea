"""How modules are imported that stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import gc, sys
sys.path.insert(0, sys.argv[1])
from holdfast.worker.job_loader import import_for_good
gc.collect()
gc.set_threshold(100)
looks = []
gc.callbacks.append(lambda phase, info: looks.append(phase))
import_for_good("large")
found = len(looks)
import_for_good("broken")
print(found, "large" in sys.modules, gc.isenabled(), gc.get_freeze_count() > 10_000)
"""


def test_the_garbage_collector_does_not_look_at_what_is_imported_for_good(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("kept = [[] for _ in range(10_000)]\n")
    (tmp_path / "broken.py").write_text("raise SystemExit\n")
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "True", "True", "True"]
