"""What other users and processes of the machine can see of a run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from tests.e2e.small import fit, make_trainer
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.train import Checkpoint


def _shown_tokens() -> list[bool]:
    """Whether this worker, its zygote, its agent and its driver show a token in /proc, or this worker's environment."""
    pid, found = os.getpid(), []
    for _ in range(4):
        shown = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        found.append(b"HOLDFAST_TOKEN" in shown)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return [*found, any("TOKEN" in name for name in os.environ)]


def test_no_process_of_a_run_shows_a_token(sandbox: Sandbox) -> None:
    assert fit(sandbox, _shown_tokens).return_value == [False] * 5


_MODES = {"secret": 0o600, "shared": 0o644, "script.sh": 0o755}


def _report_and_look(config: dict[str, str]) -> list[str]:
    """Report files of several modes; gives the directories of the cache that others may enter."""
    with tempfile.TemporaryDirectory() as directory:
        for name, mode in _MODES.items():
            Path(directory, name).write_text(name)
            Path(directory, name).chmod(mode)
        train.report({}, Checkpoint.from_directory(directory))
    below = [directory for directory, _, _ in os.walk(config["cache"])]
    return [directory for directory in [".", tempfile.gettempdir(), *below] if _is_open_to_others(directory)]


def _is_open_to_others(directory: str) -> bool:
    try:
        return bool(Path(directory).stat().st_mode & 0o077)
    except FileNotFoundError:  # the agent has stored what was staged there
        return False


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_file_modes_of_a_run_follow_the_umask_and_the_users_files(
    sandbox: Sandbox, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging, TMPDIR and the working directory are private; the user's files keep their modes, and the run's own
    files have what the umask leaves."""
    monkeypatch.delenv("TMPDIR")
    before = os.umask(umask)
    try:
        trainer = make_trainer(sandbox, _report_and_look, config={"cache": str(sandbox.cache)})
        result = trainer.fit()
    finally:
        os.umask(before)
    assert result.return_value == []
    assert result.checkpoint is not None
    stored = {name: Path(result.checkpoint.path, name).stat().st_mode & 0o777 for name in _MODES}
    assert stored == _MODES
    for path in (sandbox.storage / "run").rglob("*"):
        assert path.name in _MODES or path.stat().st_mode & umask == 0, path
    with result.checkpoint.as_directory() as directory:
        assert not Path(directory, "secret").stat().st_mode & 0o077
