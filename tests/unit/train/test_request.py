"""The request of a trainer to the controller: defaults, the function's signature, run paths."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from tests.unit.worker.fake_agent import FakeAgent, make_assignment

from holdfast.checkpoint.handle import Checkpoint
from holdfast.control.request import TrainRequest
from holdfast.engines.engine import EngineName
from holdfast.errors import ConfigError
from holdfast.storage.uri import join
from holdfast.streaming.messages import ServedStorage
from holdfast.train import (
    CheckpointConfig,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    SyncConfig,
    ValidationConfig,
    ValidationTaskConfig,
    get_dataset_shard,
)
from holdfast.train.backend import Backend, BackendConfig
from holdfast.train.paths import split_run_path
from holdfast.train.request import build_request
from holdfast.train.torch import TorchConfig, TorchTrainer
from holdfast.train.torch.group import TorchGroup
from holdfast.worker import session as sessions


def no_argument() -> str:
    return "none"


def one_argument(config: dict[str, Any]) -> str:
    return f"one {config}"


def request_of(trainer: DataParallelTrainer) -> TrainRequest:
    return build_request(trainer, trainer._takes_config, trainer._framework(), trainer._preload())


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STORAGE", str(tmp_path / "default"))
    monkeypatch.delenv("HOLDFAST_LOCAL_NODES", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_all_settings_reach_the_request(tmp_path: Path) -> None:
    trainer = TorchTrainer(
        one_argument,
        train_loop_config={"lr": 0.1, "layers": (1, 2), "loss": no_argument, "nan": float("nan")},
        scaling_config=ScalingConfig(num_workers=4, resources_per_worker={"CPU": 2}),
        run_config=RunConfig(
            name="exp",
            storage_path=str(tmp_path),
            failure_config=FailureConfig(max_failures=3, progress_timeout_s=9),
            checkpoint_config=CheckpointConfig(2, "val/acc", "min", target_overhead=0.1),
            sync_config=SyncConfig(sync_artifacts=True),
            worker_runtime_env={"env_vars": {"A": "1"}},
            takeover=True,
        ),
        torch_config=TorchConfig(backend="gloo", timeout_s=60),
    )
    request = request_of(trainer)
    assert (request.storage_path, request.name, request.trainer_name) == (str(tmp_path), "exp", "TorchTrainer")
    assert (request.min_workers, request.max_workers, request.local_mode, request.nodes) == (4, 4, False, 1)
    assert (request.max_failures, request.progress_timeout_s) == (3, 9)
    assert (request.num_to_keep, request.score_attribute, request.score_order) == (2, "val/acc", "min")
    assert request.target_overhead == 0.1
    assert (request.takeover, request.resume, request.sync_artifacts) == (True, "auto", True)
    assert request.environment == {"A": "1", "TUNE_ORIG_WORKING_DIR": str(Path.cwd())}
    plain = {"lr": 0.1, "layers": [1, 2], "loss": f"{__name__}.no_argument", "nan": "nan"}
    assert request.params == {"train_loop_config": plain}
    assert request.fingerprint.function == f"{__name__}.one_argument"
    assert request.fingerprint.config.keys() == plain.keys()
    assert f"{__name__}.no_argument" in request.fingerprint.code
    assert request.preload == ("holdfast.train.functions", "torch", "torch.distributed")
    assert request.run_context.run_config is trainer.run_config
    job = cloudpickle.loads(cloudpickle.dumps(request.job))
    assert job.framework == request.job.framework
    assert (job.framework.backend, job.framework.timeout_s) == ("gloo", 60)


def test_secrets_in_the_configuration_are_masked_in_what_is_kept() -> None:
    config = {"lr": 0.1, "wandb": {"api_key": "abcdef", "url": "https://me:hunter2@host/"}}
    request = request_of(DataParallelTrainer(one_argument, train_loop_config=config))
    kept = {"lr": 0.1, "wandb": {"api_key": "***", "url": "https://me:***@host/"}}
    assert request.params == {"train_loop_config": kept}
    stored = repr(request.fingerprint.stored()) + repr(request.fingerprint)
    assert "abcdef" not in stored and "hunter2" not in stored
    assert request.job.config == config, "the function gets it as it is"


def test_a_generated_run_name_is_kept() -> None:
    trainer = TorchTrainer(no_argument)
    first, second = request_of(trainer), request_of(trainer)
    assert first.name == second.name
    assert first.name == trainer.run_config.name
    assert first.name != request_of(TorchTrainer(no_argument)).name


def test_the_path_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def path_of(**settings: Any) -> str:
        return request_of(DataParallelTrainer(no_argument, run_config=RunConfig(**settings))).storage_path

    monkeypatch.chdir(tmp_path)
    assert path_of() == str(tmp_path / "default")
    assert path_of(storage_path="runs") == str(tmp_path / "runs")
    assert path_of(storage_path=tmp_path / "runs") == str(tmp_path / "runs")
    assert path_of(storage_path="file:///runs") == "file:///runs"
    assert path_of(local_dir="mine") == str(tmp_path / "mine")
    assert path_of(sync_config=SyncConfig(upload_dir="up"), local_dir="mine") == str(tmp_path / "up")
    assert path_of(sync_config=SyncConfig(upload_dir="up"), storage_path="runs") == str(tmp_path / "runs")


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (no_argument, False),
        (one_argument, True),
        (lambda *config: None, True),
        (lambda config, debug=False: None, True),
        (lambda *, debug=False: None, False),
        (functools.partial(one_argument, {}), False),
        (FailureConfig, True),
    ],
)
def test_the_function_may_take_the_configuration_or_nothing(function: Any, takes: bool) -> None:
    job = request_of(DataParallelTrainer(function)).job
    assert job.takes_config is takes
    assert job.config == ({} if takes else None)


class Hooked(Backend):
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        worker_group.execute(print)


class HookedConfig(BackendConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return Hooked


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        (("train",), {}, "train_loop_per_worker must be a function"),
        ((lambda config, model: None,), {}, "takes the arguments config, model"),
        ((lambda config, *, model: None,), {}, "takes the arguments config, model"),
        ((one_argument,), {"train_loop_config": [1]}, "train_loop_config must be a dict"),
        ((one_argument,), {"train_loop_config": {1: 2}}, "train_loop_config must be a dict with str keys"),
        ((one_argument,), {"scaling_config": 2}, "scaling_config must be a ScalingConfig, not int"),
        ((one_argument,), {"run_config": {}}, "run_config must be a RunConfig, not dict"),
        ((one_argument,), {"datasets": [1]}, r'datasets must be a dict such as \{"train": rows\}, not list'),
        ((one_argument,), {"datasets": {"train": 1}}, r"datasets\['train'\] is a int, which gives no rows"),
        ((one_argument,), {"datasets": {"train": {"a": [1]}}}, r"is a dict of data sets: give each of them a name"),
        ((one_argument,), {"dataset_config": "all"}, "dataset_config must be a DataConfig, not str"),
        ((one_argument,), {"metadata": [1]}, "metadata must be a dict, not list"),
        (
            (one_argument,),
            {"resume_from_checkpoint": "runs/a"},
            r"must be a Checkpoint, not str: write train.Checkpoint",
        ),
        ((one_argument,), {"backend_config": {}}, "backend_config must be a BackendConfig, not dict"),
        ((one_argument,), {"backend_config": HookedConfig()}, r"Hooked.on_start would drive a group of Ray actors"),
    ],
)
def test_a_trainer_that_cannot_run_is_refused(arguments: tuple[Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataParallelTrainer(*arguments, **settings)


def test_a_configuration_that_nobody_sees_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="takes no argument and will not see it"):
        DataParallelTrainer(no_argument, train_loop_config={"lr": 1})


def test_missing_gpus_are_reported_before_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    trainer = TorchTrainer(no_argument, scaling_config=ScalingConfig(num_workers=2, use_gpu=True))
    with pytest.raises(ConfigError, match="needs 2 GPU, but this machine has none: set use_gpu=False"):
        trainer.fit()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    request = request_of(trainer)
    assert request.environment["HOLDFAST_USE_GPU"] == "1"


def test_local_mode_in_processes_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun restarts its processes, so there is no budget of failures; and what a worker of ours starts as a process
    has torchrun's variables too, but is no rank of its own run."""
    variables = {"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    elastic = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "id"}
    address = {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in (variables | elastic | address).items():
        monkeypatch.setenv(name, value)
    local = TorchTrainer(no_argument, scaling_config=ScalingConfig(num_workers=0))
    request = request_of(local)
    assert request.torchrun is not None
    assert (request.torchrun.rank, request.torchrun.world_size) == (3, 4)
    assert request.job.framework == TorchGroup(None, 1800, from_environment=True)
    assert request_of(TorchTrainer(no_argument, scaling_config=ScalingConfig(num_workers=1))).torchrun is None
    monkeypatch.setenv("HOLDFAST_WORKER", "a worker that started this torchrun")
    assert request_of(local).torchrun is not None
    local.run_config.failure_config.max_failures = 2
    with pytest.raises(ConfigError, match=r"max_failures=2.*--max-restarts"):
        request_of(local)
    monkeypatch.setenv("HOLDFAST_WORKER", "id")
    with pytest.raises(ConfigError, match="in a process that one of 4 workers of another run started"):
        request_of(local)


def test_local_mode_and_local_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    local = request_of(DataParallelTrainer(no_argument, scaling_config=ScalingConfig(num_workers=0)))
    assert (local.local_mode, local.min_workers, local.max_workers) == (True, 1, 1)
    monkeypatch.setenv("HOLDFAST_LOCAL_NODES", "3")
    assert request_of(DataParallelTrainer(no_argument)).nodes == 3
    monkeypatch.setenv("HOLDFAST_LOCAL_NODES", "many")
    with pytest.raises(ConfigError, match="HOLDFAST_LOCAL_NODES must be"):
        request_of(DataParallelTrainer(no_argument))


def test_a_checkpoint_to_begin_with_reaches_the_function(tmp_path: Path) -> None:
    def reads() -> Any:
        return sessions.current().get_checkpoint()

    start = Checkpoint(tmp_path)
    job = request_of(DataParallelTrainer(reads, resume_from_checkpoint=start)).job
    job = cloudpickle.loads(cloudpickle.dumps(job))
    with FakeAgent() as agent:
        sessions.install(agent.session)
        try:
            assert job.function() == start
        finally:
            sessions.install(None)


def test_a_validation_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ValidationTaskConfig\(timeout_s\) must be above 0, or None, not '60'"):
        ValidationTaskConfig(timeout_s="60")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"ValidationTaskConfig\(fn_kwargs\) must be a dict of arguments, not int"):
        ValidationTaskConfig(fn_kwargs=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"ValidationConfig\(task_config\) must be a ValidationTaskConfig, not dict"):
        ValidationConfig(print, {"timeout_s": 60})  # type: ignore[arg-type]


def test_what_the_function_does_to_its_configuration_in_local_mode_is_no_change_of_the_script() -> None:
    def function(config: dict[str, Any]) -> None:
        config["model"]["layers"].append(config.pop("width"))

    given = {"width": 3, "model": {"layers": [1]}}
    trainer = DataParallelTrainer(function, train_loop_config=given, scaling_config=ScalingConfig(num_workers=0))
    first = request_of(trainer)
    first.job.function(first.job.config)
    assert given == {"width": 3, "model": {"layers": [1]}}
    assert request_of(trainer).fingerprint == first.fingerprint


def test_each_generation_opens_its_data_sets_in_local_mode_too() -> None:
    def function() -> list[int]:
        return list(get_dataset_shard("train") or ())

    settings: dict[str, Any] = {
        "scaling_config": ScalingConfig(num_workers=0),
        "datasets": {"train": lambda: iter(range(3))},
    }
    job = request_of(DataParallelTrainer(function, **settings)).job
    for _ in range(2):
        with FakeAgent() as agent:
            sessions.install(agent.session)
            try:
                assert job.function() == [0, 1, 2]
            finally:
                sessions.install(None)


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    """This process is a worker of a run."""
    with FakeAgent() as agent:
        sessions.install(agent.session)
        yield agent
        sessions.install(None)


def test_a_run_that_a_worker_starts_is_on_its_machine(
    in_worker: FakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_ENGINE", "ray")
    monkeypatch.setenv("HOLDFAST_LISTEN", "0.0.0.0:1")
    monkeypatch.setenv("TUNE_ORIG_WORKING_DIR", str(tmp_path))
    request = request_of(DataParallelTrainer(no_argument, run_config=RunConfig(storage_path="results")))
    assert (request.engine, request.listen) == (EngineName.LOCAL, None)
    assert request.storage_path == str(tmp_path / "results")
    assert request.environment["TUNE_ORIG_WORKING_DIR"] == str(tmp_path)
    assert request.environment["HOLDFAST_USE_GPU"] == "0"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"engine": "ray"}, r"engine='ray'\) in a worker of another run"),
        ({"engine": "join"}, r"engine='join'\) in a worker of another run"),
        ({"listen": "0.0.0.0:0"}, r"listen='0.0.0.0:0'\) in a worker of another run"),
        ({"use_gpu": True}, "the worker that starts this run has none: give it as many"),
    ],
)
def test_what_a_run_in_a_worker_cannot_have_is_refused(
    in_worker: FakeAgent, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=sentence):
        request_of(DataParallelTrainer(no_argument, scaling_config=ScalingConfig(**settings)))


def test_a_run_in_a_worker_that_does_not_see_the_storage_is_refused_a_directory(in_worker: FakeAgent) -> None:
    served = ServedStorage(root="/far", host="h", port=1, key="k")
    in_worker.session.assignment = make_assignment(served=served)
    for path in (None, "file:///mine/runs"):
        with pytest.raises(ConfigError, match="give both runs a path that all machines see"):
            request_of(DataParallelTrainer(no_argument, run_config=RunConfig(storage_path=path)))
    request_of(DataParallelTrainer(no_argument, run_config=RunConfig(storage_path="s3://bucket/runs")))


@pytest.mark.parametrize(
    ("path", "parent", "name"),
    [
        ("/mnt/cluster_storage/finetune-resnet", "/mnt/cluster_storage", "finetune-resnet"),
        ("/mnt/x/run/", "/mnt/x", "run"),
        (Path("/run"), "/", "run"),
        ("run", ".", "run"),
        ("s3://bucket/sub/run", "s3://bucket/sub", "run"),
        ("s3://bucket/run?endpoint_override=http://h:1", "s3://bucket?endpoint_override=http://h:1", "run"),
        ("file:///run", "file:///", "run"),
        ("file:///a/x%20y", "file:///a", "x y"),
        ("s3://bucket/a%3Fb?region=r", "s3://bucket?region=r", "a?b"),
        ("/a/x%20y?z", "/a", "x%20y?z"),
    ],
)
def test_run_paths_are_split_and_joined(path: Any, parent: str, name: str) -> None:
    assert split_run_path(path) == (parent, name)
    joined = join(parent, name)
    assert split_run_path(joined) == (parent, name)


@pytest.mark.parametrize("path", ["s3://bucket", "/", "a/..", ""])
def test_a_path_that_names_no_run_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="write"):
        split_run_path(path)
