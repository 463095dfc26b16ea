"""Callers outside the cluster (`ray://`): scripts in processes of their own, whose drivers are on the head."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs import processes
from tests.ray_cluster.conftest import RayCluster, python_path

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]
_SCRIPT = """
import json, sys
from pathlib import Path

import holdfast
import helper  # beside the script
from holdfast.train import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig
from tests.ray_cluster.jobs import steps

where, config = Path(sys.argv[2]), json.loads(sys.argv[3])
holdfast.init(address=sys.argv[1], runtime_env={"env_vars": {"FROM_CALLER": "yes"}})


def train(config):
    import os

    print("hello from", helper.NAME, os.environ["FROM_CALLER"])
    if config.get("fails"):
        raise ValueError("no such luck")
    return steps(config) | {"limit": config["steps"]}


try:
    result = DataParallelTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=config["name"], storage_path=where, failure_config=FailureConfig(max_failures=0)),
    ).fit()
except holdfast.train.TrainingFailedError as error:
    print("failed", {rank: repr(one) for rank, one in error.worker_failures.items()})
else:
    print("result", json.dumps([result.metrics, result.return_value, result.checkpoint.path]))
    print("rows", len(result.metrics_dataframe))
"""


@pytest.fixture(scope="module")
def cluster(cluster_root: Path) -> Iterator[RayCluster]:
    """This process is not connected to it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = RayCluster(cluster_root, ray_client_server_port=port)
    made.client_address = f"ray://127.0.0.2:{port}"
    try:
        made.add_node(num_cpus=2)
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def nothing_left(cluster: RayCluster) -> Iterator[None]:
    """No driver, agent or worker outlives its run."""
    yield
    marker = f"HOLDFAST_LOCAL_CACHE_DIR={cluster.root / 'cache'}"
    found = processes.with_environment(marker)
    ours = [pid for pid in found if processes.name_of(pid).startswith("hf-") or _is_driver(pid)]
    processes.wait_gone(*ours)


def _is_driver(pid: int) -> bool:
    return "holdfast.train.remote_driver" in processes.command_of(pid)


def _is_its_actor(pid: int) -> bool:
    return processes.command_of(pid).startswith("ray::DriverActor")


class Caller:
    """A script on a laptop: in a directory of its own, which the cluster does not know."""

    def __init__(
        self, cluster: RayCluster, path: Path, config: dict[str, Any], script: str = _SCRIPT, **variables: str
    ) -> None:
        place = path / "laptop"
        place.mkdir(exist_ok=True)
        (place / "script.py").write_text(textwrap.dedent(script))
        (place / "helper.py").write_text("NAME = 'helper'\n")
        given = {"name": "run", "steps": 5, "run_directory": str(path / "storage" / "run"), **config}
        environment = {**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"}
        environment |= {
            "HOLDFAST_GRACE_S": "1",
            "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "2",
            "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "1",
            **variables,
        }
        del environment["HOLDFAST_ENGINE"]
        self._output = path / f"output-{len(list(path.glob('output-*')))}"
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "script.py", cluster.client_address, str(path / "storage"), json.dumps(given)],
                env=environment,
                cwd=place,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait(self, code: int = 0) -> str:
        try:
            assert self.process.wait(120) == code, self.output
        finally:
            self.kill()
        return self.output

    def wait_for(self, text: str) -> None:
        processes.wait_until(lambda: text in self.output or self.process.poll() is not None, text)
        assert text in self.output, self.output

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _result(output: str) -> Any:
    (line,) = [one for one in output.splitlines() if one.startswith("result ")]
    return json.loads(line.removeprefix("result "))


def test_a_caller_elsewhere_gets_the_output_and_the_result(cluster: RayCluster, tmp_path: Path) -> None:
    output = Caller(cluster, tmp_path, {}).wait()
    metrics, value, checkpoint = _result(output)
    assert metrics["step"] == 5 and value["limit"] == 5
    assert checkpoint == str(tmp_path / "storage" / "run" / "checkpoint_000004")
    assert "hello from helper yes" in output and "rows 5" in output


def test_a_run_that_fails_raises_at_the_caller_what_its_workers_raised(cluster: RayCluster, tmp_path: Path) -> None:
    output = Caller(cluster, tmp_path, {"fails": True}).wait()
    assert "failed" in output and "ValueError('no such luck')" in output.partition("failed ")[2]
    assert "ValueError: no such luck" in output


def test_a_killed_caller_comes_back_to_the_run_that_goes_on(cluster: RayCluster, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    config = {"hold_at": 2, "hold_file": str(hold)}
    first = Caller(cluster, tmp_path, config)
    try:
        first.wait_for("hello from helper")
        processes.wait_until(lambda: _checkpoints(tmp_path) >= 2, "two checkpoints")
    finally:
        first.kill()
    second = Caller(cluster, tmp_path, config)
    try:
        second.wait_for("The run run is running on the Ray cluster.")
        second.wait_for("hello from helper")
        hold.touch()
        output = second.wait()
    finally:
        hold.touch()
        second.kill()
    assert _result(output)[1]["first"] == 0, "it was started anew"
    assert not _was_driven_again(tmp_path)


def test_an_outcome_that_nobody_took_is_kept_for_a_caller_that_comes_back(cluster: RayCluster, tmp_path: Path) -> None:
    config = _leave_until_it_has_ended(cluster, tmp_path)
    output = Caller(cluster, tmp_path, config).wait()
    assert "The run run has ended on the Ray cluster." in output and "hello from helper" in output
    assert _result(output)[0]["step"] == 5 and not _was_driven_again(tmp_path)


def test_later_the_same_call_gets_the_result_from_storage(cluster: RayCluster, tmp_path: Path) -> None:
    config = _leave_until_it_has_ended(cluster, tmp_path, HOLDFAST_KEEP_OUTCOME_S="0")
    # Callers that were waiting may still be reading it for some seconds.
    processes.wait_gone(*filter(_is_its_actor, processes.descendants(os.getpid())))
    output = Caller(cluster, tmp_path, config).wait()
    assert "The run run has its driver on the Ray cluster." in output, "the outcome was kept"
    assert _result(output)[0]["step"] == 5 and "hello from helper" not in output


def _leave_until_it_has_ended(cluster: RayCluster, path: Path, **variables: str) -> dict[str, Any]:
    """Kill the caller of a run, and return when its driver has ended; gives the configuration."""
    hold = path / "hold"
    config = {"hold_at": 2, "hold_file": str(hold)}
    caller = Caller(cluster, path, config, **variables)
    try:
        caller.wait_for("hello from helper")
    finally:
        caller.kill()
        hold.touch()
    marker = f"HOLDFAST_LOCAL_CACHE_DIR={cluster.root / 'cache'}"
    processes.wait_gone(*filter(_is_driver, processes.with_environment(marker)))
    return config


def _was_driven_again(path: Path) -> bool:
    return (path / "storage" / "run" / "epochs" / "000002.json").exists()


def test_a_run_without_a_name_says_by_which_one_it_can_be_come_back_to(cluster: RayCluster, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    config = {"name": None, "run_directory": str(tmp_path), "hold_at": 2, "hold_file": str(hold)}
    first = Caller(cluster, tmp_path, config)
    try:
        first.wait_for("hello from helper")
    finally:
        first.kill()
    found = re.search(r"the same call comes back to it with RunConfig\(name='([^']+)', storage_path=", first.output)
    assert found is not None, first.output
    second = Caller(cluster, tmp_path, config | {"name": found[1]})
    try:
        second.wait_for(f"The run {found[1]} is running on the Ray cluster")
        hold.touch()
        assert _result(second.wait())[1]["first"] == 0, "it was started anew"
    finally:
        hold.touch()
        second.kill()


def test_ctrl_c_at_the_caller_stops_the_run_and_the_same_call_continues_it(cluster: RayCluster, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    config = {"hold_at": 2, "hold_file": str(hold)}
    first = Caller(cluster, tmp_path, config)
    try:
        processes.wait_until(lambda: _checkpoints(tmp_path) >= 2, "two checkpoints")
        first.process.send_signal(signal.SIGINT)
        output = first.wait(130)
    finally:
        hold.touch()
        first.kill()
    assert "Traceback" not in output
    assert _result(Caller(cluster, tmp_path, config).wait())[1]["first"] == 2


def test_an_experiment_of_a_caller_elsewhere_has_its_results_there(cluster: RayCluster, tmp_path: Path) -> None:
    script = """
        import sys

        import holdfast
        from holdfast import tune


        def trial(config):
            tune.report({"score": config["x"] ** 2})
            if config["x"] == 2:
                raise ValueError("not this one")


        holdfast.init(address=sys.argv[1])
        results = tune.Tuner(
            trial,
            param_space={"x": tune.grid_search([1, 2, 3])},
            tune_config=tune.TuneConfig(metric="score", mode="max"),
            run_config=tune.RunConfig(name="search", storage_path=sys.argv[2]),
        ).fit()
        best = results.get_best_result()
        print("best", best.config["x"], best.metrics["score"], len(results), [str(one) for one in results.errors][:1])
        """
    output = Caller(cluster, tmp_path, {}, script).wait()
    (line,) = [one for one in output.splitlines() if one.startswith("best ")]
    assert line.startswith("best 3 9 3 ") and "not this one" in line


def test_what_the_cluster_can_never_give_is_one_sentence_at_the_caller(cluster: RayCluster, tmp_path: Path) -> None:
    script = """
        import sys

        import holdfast
        from holdfast.train import DataParallelTrainer, ScalingConfig, RunConfig

        holdfast.init(address=sys.argv[1])
        scaling = ScalingConfig(num_workers=1, use_gpu=True)
        DataParallelTrainer(print, scaling_config=scaling, run_config=RunConfig(storage_path=sys.argv[2])).fit()
        """
    output = Caller(cluster, tmp_path, {}, script).wait(1)
    assert "ConfigError: The run asks for 1 GPU for each worker, but no node of the Ray cluster has a GPU" in output


def test_a_caller_that_lost_its_cluster_is_told_what_to_do(cluster: RayCluster, tmp_path: Path) -> None:
    """The last test: the cluster is gone afterwards."""
    hold = tmp_path / "hold"
    caller = Caller(cluster, tmp_path, {"hold_at": 2, "hold_file": str(hold)})
    try:
        caller.wait_for("hello from helper")
        cluster.kill()
        output = caller.wait(1)
    finally:
        hold.touch()
        caller.kill()
    assert "RunError: The run run: the connection to its Ray cluster was lost; if the cluster lives, the run" in output
    output = Caller(cluster, tmp_path, {}).wait(1)
    assert f"ConfigError: No Ray cluster answers at {cluster.client_address}: check that its head runs" in output


def _checkpoints(path: Path) -> int:
    return len(list((path / "storage" / "run").glob("checkpoint_*/.manifest.json")))
