"""The workers' TMPDIR is short enough for Unix sockets wherever the home directory is, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from tests.faults.agent_harness import job_of, run_async, started_agent, wait_gone

from holdfast.agent.session_dir import SessionDir, remove_dangling_links

_HOME_CHARACTERS = 60


@pytest.fixture
def long_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory of at least 60 characters, with the cache where it is by default."""
    home = tmp_path / "home"
    home /= "x" * max(1, _HOME_CHARACTERS - len(f"{home}/"))
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    for name in ("TMPDIR", "HOLDFAST_LOCAL_CACHE_DIR", "RAY_AIR_LOCAL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return home


def _links_to(home: Path) -> list[Path]:
    return [path for path in Path("/tmp").glob("hf-*") if str(home) in os.path.realpath(path)]


def _load_batches() -> int:
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(torch.arange(8.0), batch_size=2, num_workers=2, timeout=100)
    return int(sum(batch.sum() for batch in loader))


def test_data_loader_workers_start_where_the_home_directory_path_is_long(tmp_path: Path, long_home: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path, HOLDFAST_LOCAL_CACHE_DIR=str(long_home / ".cache" / "holdfast")) as harness:
            await harness.prepare(job_of(_load_batches), preload=["torch"])
            await harness.started()
            assert (await harness.finished()).value == 28
            assert len(_links_to(long_home)) == 1
        assert _links_to(long_home) == []

    run_async(test)


def _make_files_and_wait() -> None:
    directory = tempfile.mkdtemp()
    Path(directory, "data").write_bytes(b"x" * 1000)
    print(f"made {directory} {oct(Path(tempfile.gettempdir()).resolve().parent.stat().st_mode)}", flush=True)
    signal.pause()


@pytest.mark.parametrize("with_zygote", [False, True], ids=["agent", "agent and zygote"])
def test_a_killed_agent_leaves_nothing_of_its_workers_temporary_files(
    tmp_path: Path, long_home: Path, with_zygote: bool
) -> None:
    """Its zygote removes them; if that is killed too, the next agent does."""
    cache = long_home / ".cache" / "holdfast"

    async def test() -> None:
        async with started_agent(tmp_path, HOLDFAST_LOCAL_CACHE_DIR=str(cache)) as harness:
            await harness.prepare(job_of(_make_files_and_wait))
            pids = await harness.started()
            await harness.expect_line("made ")
            (line,) = [line.text for logs in harness.logs for line in logs.lines if line.text.startswith("made")]
            made = Path(line.split()[1])
            assert made.is_dir() and len(str(made.parent)) < 40
            assert line.split()[2] == "0o40700"
            zygote = harness.zygote()
            if with_zygote:
                os.kill(zygote, signal.SIGSTOP)
                harness.process.kill()
                os.kill(zygote, signal.SIGKILL)
            else:
                harness.process.kill()
            await wait_gone(zygote, *pids.values())
        if with_zygote:
            assert _links_to(long_home)
            SessionDir("next", cache).remove()
        assert _links_to(long_home) == []
        assert not any(path.is_file() for path in cache.rglob("*"))

    run_async(test)


def test_only_tmpdir_links_of_dead_agents_are_removed(tmp_path: Path) -> None:
    living = tmp_path / "agents" / "a" / "tmp"
    living.mkdir(parents=True)
    (tmp_path / "hf-living").symlink_to(living)
    (tmp_path / "hf-dead").symlink_to(tmp_path / "agents" / "b" / "tmp")
    (tmp_path / "hf-foreign").symlink_to("/nowhere/at/all")
    (tmp_path / "hf-file").write_text("")
    remove_dangling_links([tmp_path])
    assert sorted(path.name for path in tmp_path.glob("hf-*")) == ["hf-file", "hf-foreign", "hf-living"]
