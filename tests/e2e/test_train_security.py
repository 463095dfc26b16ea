"""What other users and other processes of the machine can see of a run."""

from __future__ import annotations

import os
from pathlib import Path

from tests.e2e.small import fit
from tests.faults.programs.place import Place


def _shown_tokens() -> list[bool]:
    """Whether this worker, its zygote, its agent and its driver show a token in /proc, or this worker's environment."""
    pid, found = os.getpid(), []
    for _ in range(4):
        shown = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        found.append(b"HOLDFAST_TOKEN" in shown)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return [*found, any("TOKEN" in name for name in os.environ)]


def test_no_process_of_a_run_shows_a_token(place: Place) -> None:
    assert fit(place, _shown_tokens).return_value == [False] * 5
