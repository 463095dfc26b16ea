"""Runs on agents that join by themselves: here on loopback, in tests/hosts over a network."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.e2e.joined_agents import free_port, joined_agent
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.core import records as r
from holdfast.errors import ConfigError
from holdfast.storage.run_secret import open_secret
from holdfast.train import DataParallelTrainer, Result, RunConfig, ScalingConfig
from holdfast.train.torch import TorchTrainer


@pytest.fixture(autouse=True)
def _secret(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents may start before their driver has made the secret. The current directory is sent, so it is a small one."""
    open_secret()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOLDFAST_AGENTS_TIMEOUT_S", "90")


def _trainer(sandbox: Sandbox, port: int, name: str = "run", **scaling: object) -> DataParallelTrainer:
    listen = f"127.0.0.1:{port}"
    return DataParallelTrainer(
        _where,
        scaling_config=ScalingConfig(engine="join", listen=listen, **scaling),  # type: ignore[arg-type]
        run_config=RunConfig(name=name, storage_path=sandbox.storage),
    )


def _where() -> list[str]:
    """The agents of all ranks."""
    context = train.get_context()
    mine = {context.get_world_rank(): os.environ["TEST_AGENT"]}
    train.report({"rank": context.get_world_rank()})
    return [mine[rank] for rank in sorted(mine)]


def test_a_run_waits_for_agents_that_join_and_they_end_with_the_driver(sandbox: Sandbox) -> None:
    port = free_port()
    with ThreadPoolExecutor() as threads:
        result = threads.submit(_trainer(sandbox, port, num_workers=2).fit)
        with (
            joined_agent(port, "first", "--slots", "1") as first,
            joined_agent(port, "second", "--slots", "1") as second,
        ):
            assert result.result(timeout=120).return_value == ["first"] or result.result().return_value == ["second"]
            assert (first.wait(60), second.wait(60)) == (0, 0)


def test_two_runs_that_listen_at_different_addresses_share_the_agents_of_both(sandbox: Sandbox) -> None:
    """The second run has a listener of its own; an agent serves runs of either."""
    ports = [free_port(), free_port()]
    done: list[Result] = []
    threads = [
        threading.Thread(target=lambda n=n: done.append(_trainer(sandbox, ports[n], f"run{n}", num_workers=2).fit()))
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    with joined_agent(ports[0], "a", "--slots", "1"), joined_agent(ports[1], "b", "--slots", "1"):
        for thread in threads:
            thread.join(120)
    assert len(done) == 2


def test_an_agent_that_stays_serves_one_driver_after_the_other(sandbox: Sandbox) -> None:
    port = free_port()
    with joined_agent(port, "a", "--stay") as agent:
        for name in ("one", "two"):
            assert _trainer(sandbox, port, name, num_workers=1).fit().return_value == ["a"]
        assert agent.poll() is None


def test_an_agent_that_stays_waits_for_the_next_driver_without_a_warning(sandbox: Sandbox) -> None:
    port = free_port()
    with joined_agent(port, "a", "--stay") as agent:
        assert _trainer(sandbox, port, num_workers=1).fit().return_value == ["a"]
        with socket.create_server(("127.0.0.1", port)) as nobody:
            for _ in range(2):  # the second time it has found nobody
                nobody.accept()[0].close()
        agent.terminate()
        assert agent.communicate(timeout=60)[1] == ""


def test_an_agent_whose_handshake_is_cut_dials_again(sandbox: Sandbox) -> None:
    """A controller that is too busy to answer in time hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as busy, ThreadPoolExecutor() as threads:
        port = busy.getsockname()[1]
        with joined_agent(port, "a"):
            busy.accept()[0].close()
            busy.close()
            result = threads.submit(_trainer(sandbox, port, num_workers=1).fit)
            assert result.result(timeout=120).return_value == ["a"]


def test_custom_resources_of_an_agent_are_what_runs_wait_for(sandbox: Sandbox) -> None:
    port = free_port()
    with ThreadPoolExecutor() as threads:
        trainer = _trainer(sandbox, port, num_workers=1, resources_per_worker={"disk": 2})
        result = threads.submit(trainer.fit)
        with joined_agent(port, "without"), joined_agent(port, "with", "--resources", '{"disk": 2}'):
            assert result.result(timeout=120).return_value == ["with"]


def test_an_agent_with_another_torch_gets_no_workers_of_a_run_that_needs_torch(sandbox: Sandbox) -> None:
    old = sandbox.root / "old"
    (old / "torch").mkdir(parents=True)
    (old / "torch/__init__.py").touch()
    (old / "torch/version.py").write_text("__version__ = '1.13.1'\n")
    port = free_port()
    trainer = TorchTrainer(
        _where,
        scaling_config=ScalingConfig(engine="join", listen=f"127.0.0.1:{port}", num_workers=1),
        run_config=RunConfig(name="run", storage_path=sandbox.storage),
    )
    with ThreadPoolExecutor() as threads:
        result = threads.submit(trainer.fit)
        with joined_agent(port, "old", PYTHONPATH=str(old)):
            while not (refused := [one for one in _records(sandbox) if isinstance(one, r.AgentRefused)]):
                time.sleep(0.05)
            assert refused[0].why.startswith("Agent old gets no workers of this run: it has torch 1.13.1 and the ")
            with joined_agent(port, "new"):
                assert result.result(timeout=120).return_value == ["new"]


def _records(sandbox: Sandbox) -> list[r.Record]:
    """Those of a run that may not have begun yet."""
    return sandbox.records() if (Path(sandbox.storage) / "run/journal").is_dir() else []


def _workers_here() -> int:
    return train.get_context().get_local_world_size()


def test_strictly_spread_workers_are_on_agents_of_their_own(sandbox: Sandbox) -> None:
    port = free_port()
    with ThreadPoolExecutor() as threads:
        trainer = _trainer(sandbox, port, num_workers=2, placement_strategy="STRICT_SPREAD")
        trainer.train_loop_per_worker = _workers_here
        result = threads.submit(trainer.fit)
        with joined_agent(port, "first", "--slots", "2"), joined_agent(port, "second", "--slots", "2"):
            assert result.result(timeout=120).return_value == 1


def test_what_one_machine_can_never_place_is_one_sentence(sandbox: Sandbox) -> None:
    scaling = ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD")
    run = RunConfig(name="run", storage_path=sandbox.storage)
    with pytest.raises(ConfigError, match=r"placement_strategy='STRICT_SPREAD'\) cannot place 2 workers on this one"):
        DataParallelTrainer(_workers_here, scaling_config=scaling, run_config=run).fit()


def test_an_address_that_is_taken_is_one_sentence(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"ScalingConfig\(listen='127.0.0.1:{port}'\) cannot be listened at: .*in use"
        ):
            _trainer(sandbox, port, num_workers=1).fit()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--join", "nowhere"], "must be of the form HOST:PORT"),
        (["--resources", "x"], "--resources must be JSON"),
        (["--resources", '{"a": -1}'], "amounts of 0 or more"),
    ],
)
def test_a_bad_option_of_an_agent_is_one_sentence(sandbox: Sandbox, options: list[str], why: str) -> None:
    command = [sys.executable, "-m", "holdfast.agent", "--join", "127.0.0.1:9", "--dial", "0", *options]
    environment = {**os.environ, "HOLDFAST_TOKEN": "s"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and why in done.stderr
    assert "Traceback" not in done.stderr


def test_an_agent_that_nobody_needs_or_with_another_secret_is_told_so(sandbox: Sandbox, tmp_path: Path) -> None:
    port = free_port()
    with ThreadPoolExecutor() as threads:
        result = threads.submit(_trainer(sandbox, port, num_workers=1).fit)
        with joined_agent(port, "stranger", HOLDFAST_TOKEN="wrong") as stranger:
            _, error = stranger.communicate(timeout=60)
            assert stranger.returncode == 1 and "run secret is not the controller's" in error
        with joined_agent(port, "right"):
            assert result.result(timeout=120).return_value == ["right"]


def test_modules_beside_the_script_reach_agents_and_are_sent_once(sandbox: Sandbox, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "beside.py").write_text("VALUE = 7")
    (project / "script.py").write_text(_SCRIPT)
    port = free_port()
    command = [sys.executable, str(project / "script.py"), str(port), str(sandbox.storage)]
    with joined_agent(port, "a", HOLDFAST_LOCAL_CACHE_DIR=str(tmp_path / "node")) as agent:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert agent.wait(60) == 0
    value, file, directory = done.stdout.splitlines()[-1].split()
    assert value == "7"
    assert Path(file).is_relative_to(tmp_path / "node" / "agents" / "a" / "code")
    assert Path(directory).parent == tmp_path / "node" / "work", "of the agent's own cache"
    assert not list((tmp_path / "node" / "agents").iterdir())


_SCRIPT = """
import sys
from holdfast.train import DataParallelTrainer, RunConfig, ScalingConfig

def train():
    import beside, os
    return [str(beside.VALUE), beside.__file__, os.getcwd()]

trainer = DataParallelTrainer(
    train,
    scaling_config=ScalingConfig(engine="join", listen=f"127.0.0.1:{sys.argv[1]}"),
    run_config=RunConfig(name="run", storage_path=sys.argv[2]),
)
print(*trainer.fit().return_value)
"""
