"""Makes docs/migrating.md from `differences`: `python -m tests.compat.page` writes it, a test compares it."""

from __future__ import annotations

from pathlib import Path

from tests.compat.differences import BEHAVIOUR, MISSING, OTHER_DEFAULTS, OURS

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"

_HEAD = """\
# Migrating from Ray Train

Replace `ray` by `holdfast` in the imports, and leave the rest of the script as it is:

<!-- not run: it shows what changes in a script of the reader's -->
```python
import holdfast  # was: import ray
from holdfast.train import Checkpoint, RunConfig, ScalingConfig
from holdfast.train.torch import TorchTrainer

holdfast.init()  # may stay, and may go
```

Names, parameters, their order and their defaults are those of Ray Train 2.60 (its second version, the default
there), except for what this page lists. `make test-ray` compares them with an installed Ray; this page is made from
the same list (`tests/compat/differences.py`).
"""


def render() -> str:
    parts = [_HEAD]
    parts.append("## What behaves differently\n\n| what | Ray Train | Holdfast |\n|---|---|---|")
    parts[-1] += "".join(f"\n| {what} | {theirs} | {mine} |" for what, theirs, mine in BEHAVIOUR) + "\n"
    for title, entries in (
        ("What is not here", MISSING),
        ("Other defaults", OTHER_DEFAULTS),
        ("What Ray does not have", OURS),
    ):
        rows = "".join(f"\n| `{key}` | {reason} |" for key, reason in sorted(entries.items()))
        parts.append(f"## {title}\n\n| name | why |\n|---|---|{rows}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render())
