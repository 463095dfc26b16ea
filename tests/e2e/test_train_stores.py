"""Runs on storage that is no local disk: S3 servers of both kinds, with outages, and any pyarrow filesystem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.contract import servers
from tests.faults.programs import jobs, processes
from tests.faults.programs.driver_main import trainer
from tests.faults.programs.proxy import proxy_to
from tests.faults.programs.sandbox import Sandbox

from holdfast.checkpoint.verify import verify
from holdfast.storage.locate import open_store
from holdfast.storage.uri import join
from holdfast.train import Result

_STEPS = 12
_KILLED = {"prints": True, "steps": _STEPS, "every": 3, "faults": {"1:1:4": "kill", "2:0:8": "raise"}}
_HELD = {"prints": True, "steps": _STEPS, "every": 3, "faults": {"1:0:7": "hold", "1:1:7": "hold"}}


def _check(result: Result, filesystem: object | None, path: str, logs_of: int = 1) -> None:
    assert result.return_value == jobs.undisturbed(_STEPS)[-1]
    frame = result.metrics_dataframe
    assert frame is not None
    assert list(frame["loss"]) == jobs.losses(_STEPS)
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        for rank in (0, 1):
            assert json.loads(Path(directory, f"rank_{rank}.json").read_text()) == jobs.undisturbed(_STEPS, rank)[-1]
    store = open_store(path, filesystem)
    report = verify(store, deep=True)
    assert report.intact and len(report.ok) == _STEPS // 3
    lines = store.get("result.json").splitlines()
    assert [json.loads(line)["loss"] for line in lines] == jobs.losses(_STEPS)
    assert {entry.key for entry in store.list("logs")} >= {f"logs/generation_{logs_of:06d}/rank_1.log"}
    store.close()


@pytest.mark.parametrize("kind", ["moto", "rclone"])
def test_a_run_on_s3_survives_killed_workers(
    moto: servers.Server, rclone: servers.Server, sandbox: Sandbox, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = moto if kind == "moto" else rclone
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    uri = server.uri(server.new_bucket(), "runs")
    done = trainer(storage=uri, config=_KILLED, failure={"max_failures": 2}).fit()
    run = join(uri, "run")
    _check(done, None, run)
    _check(Result.from_path(run), None, run)
    again = trainer(storage=uri, config=_KILLED, failure={"max_failures": 2}).fit()
    assert again.return_value == done.return_value


def test_a_run_on_s3_waits_for_an_outage_to_end(
    moto: servers.Server, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    with proxy_to(moto.endpoint) as (endpoint, proxy):
        near = servers.Server("s3", endpoint, moto.environment, moto.make_bucket)
        uri = near.uri(near.new_bucket(), "runs")
        driver = sandbox.start_driver(_HELD, storage=uri)
        driver.expect("CheckpointCommitted", iteration=6)
        proxy.cut()
        sandbox.open_gate()
        assert proxy.refused.wait(60)
        proxy.mend()
        driver.value()
        run = join(uri, "run")
        _check(Result.from_path(run), None, run)


@pytest.mark.parametrize("source", ["keys", "credential_process"])
def test_a_run_on_s3_goes_on_with_new_credentials_when_the_old_ones_have_expired(
    moto: servers.Server, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    """Requests are refused for a while, since the credentials are renewed only after they have expired."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    answer = tmp_path / "answer.json"
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {answer}\n")

    def renew(key: str) -> None:
        if source == "keys":
            text = f"[default]\naws_access_key_id={key}\naws_secret_access_key=secret\naws_session_token=token\n"
            target = tmp_path / "credentials"
        else:
            # Expired already, so the command is run again each time.
            told = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": "secret", "SessionToken": "token"}
            text, target = json.dumps({**told, "Expiration": "2026-01-01T00:00:00Z"}), answer
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(target)

    bucket = moto.new_bucket()
    renew("first")
    moto.request("PUT", f"/_only_key/{bucket}/first")
    driver = sandbox.start_driver(_HELD, storage=moto.uri(bucket, "runs"))
    driver.expect("CheckpointCommitted", iteration=6)
    moto.request("PUT", f"/_only_key/{bucket}/second")
    sandbox.open_gate()
    moto.request("GET", f"/_refused/{bucket}")
    renew("second")
    driver.value()
    run = join(moto.uri(bucket, "runs"), "run")
    _check(Result.from_path(run), None, run)
    assert not [line for line in driver.errors.splitlines() if "secret" in line or "token=" in line]


@pytest.mark.parametrize("kind", ["moto", "rclone"])
def test_a_driver_that_is_killed_during_an_upload_to_s3_resumes_from_that_checkpoint(
    moto: servers.Server, rclone: servers.Server, sandbox: Sandbox, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = moto if kind == "moto" else rclone
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with proxy_to(server.endpoint) as (endpoint, proxy):
        near = servers.Server("s3", endpoint, server.environment, server.make_bucket)
        uri = near.uri(near.new_bucket(), "runs")
        proxy.hold(b"checkpoint_000001/rank_1.json")
        config: dict[str, Any] = {"prints": True, "steps": _STEPS, "every": 3}
        first = sandbox.start_driver(config, storage=uri)
        assert proxy.held.wait(60)
        agents = first.agents()
        first.kill()
        first.end()
        second = sandbox.start_driver(config, storage=uri)
        processes.wait_until(lambda: "checkpoint_000001 is still being stored" in second.errors, "a driver that waits")
        proxy.release()
        second.value()
        assert second.expect("GenerationStarted")["iteration"] == 6
        processes.wait_gone(*agents)
        run = join(uri, "run")
        _check(Result.from_path(run), None, run, logs_of=2)


def test_a_driver_that_is_cut_off_from_s3_and_overtaken_leaves_the_result_files_alone(
    moto: servers.Server, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has reports, a checkpoint and its end to write when the connection is restored, after its successor has
    finished."""
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    with proxy_to(moto.endpoint) as (endpoint, proxy):
        near = servers.Server("s3", endpoint, moto.environment, moto.make_bucket)
        bucket = near.new_bucket()
        first = sandbox.start_driver(_HELD, storage=near.uri(bucket, "runs"))
        first.expect("CheckpointCommitted", iteration=6)
        first.expect_step(6)
        proxy.cut()
        sandbox.open_gate()
        assert proxy.refused.wait(60)
        uri = moto.uri(bucket, "runs")
        second = sandbox.start_driver(_HELD, storage=uri, run={"takeover": True})
        second.value()
        run = open_store(join(uri, "run"))
        names = [entry.key for entry in run.list() if "/" not in entry.key]
        assert {"result.json", "progress.csv", "params.json"} <= set(names)
        before = {name: run.get(name) for name in names}
        proxy.mend()
        assert first.raised()["type"] == "Fenced"
        after = {entry.key: run.get(entry.key) for entry in run.list() if "/" not in entry.key}
        assert after == before
        run.close()
        _check(Result.from_path(join(uri, "run")), None, join(uri, "run"))


@pytest.mark.parametrize("kind", ["subtree", "fsspec"])
def test_a_run_on_a_custom_filesystem(sandbox: Sandbox, kind: str) -> None:
    from pyarrow import fs

    root = sandbox.root / "custom"
    root.mkdir()
    if kind == "subtree":
        filesystem, path = fs.SubTreeFileSystem(str(root), fs.LocalFileSystem()), "runs"
    else:
        from fsspec.implementations.local import LocalFileSystem

        filesystem, path = fs.PyFileSystem(fs.FSSpecHandler(LocalFileSystem())), str(root / "runs")
    run = {"storage_filesystem": filesystem}
    done = trainer(storage=path, config=_KILLED, failure={"max_failures": 2}, run=run).fit()
    _check(done, filesystem, f"{path}/run")
    assert (root / "runs" / "run" / "checkpoint_000003" / "rank_1.json").exists()
