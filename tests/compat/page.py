"""Makes docs/migrating.md from `differences`, and docs/migrating-tune.md from `differences_tune`: `python -m
tests.compat.page` writes them, a test compares them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.compat import differences_tune
from tests.compat.differences import BEHAVIOUR, MISSING, OTHER_DEFAULTS, OURS
from tests.compat.guides import GUIDES

__all__ = ["PAGE", "TUNE_PAGE", "render", "render_tune"]

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
TUNE_PAGE = PAGE.with_name("migrating-tune.md")

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

_TUNE_HEAD = """\
# Migrating from Ray Tune

Replace `ray` by `holdfast` in the imports, `ray.air` included. Names, parameters, their order and their defaults are
those of Ray Tune 2.60, except for what this page lists. `make test-ray` compares them with an installed Ray; this page
is made from the same list (`tests/compat/differences_tune.py`).
"""

_GUIDES_HEAD = """\
## Ray Train's guides

The Python blocks of these pages were run with `ray` replaced by `holdfast`, `use_gpu=True` left out and placeholders
filled in, on a machine without GPUs.
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
    rows = "".join(f"\n| {page} | {result} | {how} |" for page, result, how in GUIDES)
    parts.append(f"{_GUIDES_HEAD}\n| page | result | replaced, or why not |\n|---|---|---|{rows}\n")
    return "\n".join(parts)


def render_tune() -> str:
    parts = [_TUNE_HEAD]
    parts.append("## What behaves differently\n\n| what | Ray Tune | Holdfast |\n|---|---|---|")
    parts[-1] += (
        "".join(f"\n| {what} | {theirs} | {mine} |" for what, theirs, mine in differences_tune.BEHAVIOUR) + "\n"
    )
    for title, entries in (
        ("What is not here", {**differences_tune.MISSING, **differences_tune.MISSING_INTEGRATIONS}),
        ("Other defaults", differences_tune.OTHER_DEFAULTS),
        ("What Ray does not have", differences_tune.OURS),
    ):
        rows = "".join(f"\n| {names} | {reason} |" for reason, names in _by_reason(entries).items())
        parts.append(f"## {title}\n\n| names | why |\n|---|---|{rows}\n")
    return "\n".join(parts)


def _by_reason(entries: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for key, reason in sorted(entries.items()):
        found.setdefault(reason, []).append(f"`{key}`")
    return {reason: ", ".join(names) for reason, names in found.items()}


if __name__ == "__main__":
    PAGE.write_text(render())
    TUNE_PAGE.write_text(render_tune())
