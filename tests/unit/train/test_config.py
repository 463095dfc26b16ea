"""A wrong setting raises one sentence that names the field and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.storage.locate import default_storage_path
from holdfast.train import (
    CheckpointConfig,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    SyncConfig,
    UserCallback,
)
from holdfast.train.torch import TorchConfig


def test_the_defaults_are_those_of_ray() -> None:
    assert (ScalingConfig().num_workers, ScalingConfig().use_gpu) == (1, False)
    assert (FailureConfig().max_failures, FailureConfig().max_preemption_failures) == (0, -1)
    assert (CheckpointConfig().num_to_keep, CheckpointConfig().checkpoint_score_order) == (None, "max")
    assert (SyncConfig().sync_period, SyncConfig().sync_artifacts) == (300, False)
    run = RunConfig()
    assert (run.resume, run.takeover) == ("auto", False)
    assert run.name is not None and run.name.startswith("holdfast_train_run-2") and run.name != RunConfig().name
    assert run.storage_path == default_storage_path()
    assert (run.failure_config, run.checkpoint_config) == (FailureConfig(), CheckpointConfig())
    assert TorchConfig() == TorchConfig(backend=None, init_method="env", timeout_s=1800)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (ScalingConfig, {"num_workers": -1}, r"ScalingConfig\(num_workers\) must be a whole number of 0 or more"),
        (ScalingConfig, {"num_workers": 2.0}, r"ScalingConfig\(num_workers\).*not 2.0"),
        (ScalingConfig, {"num_workers": True}, r"ScalingConfig\(num_workers\).*not True"),
        (ScalingConfig, {"num_workers": (4, 1)}, r"num_workers=\(4, 1\)\): a range is \(fewest, most\), two whole"),
        (ScalingConfig, {"num_workers": (0, 1)}, r"num_workers=\(0, 1\)\): a range"),
        (ScalingConfig, {"num_workers": (1, 2, 3)}, r"num_workers=\(1, 2, 3\)\): a range"),
        (ScalingConfig, {"spares": -1}, r"ScalingConfig\(spares\)"),
        (ScalingConfig, {"num_workers": (1, 2), "last_call_timeout": -1}, r"last_call_timeout\) must be a number"),
        (ScalingConfig, {"num_workers": 2, "label_selector": [{"a": "b"}]}, r"has 1 entries for 2 workers"),
        (ScalingConfig, {"use_gpu": 1}, r"ScalingConfig\(use_gpu\) must be True or False"),
        (ScalingConfig, {"resources_per_worker": ["CPU"]}, r"resources_per_worker\) must be a dict such as"),
        (ScalingConfig, {"resources_per_worker": {"CPU": -1}}, r"'CPU': -1 does not"),
        (ScalingConfig, {"resources_per_worker": {"GPU": 1}}, r"asks for 1 GPU but use_gpu is False"),
        (ScalingConfig, {"use_gpu": True, "resources_per_worker": {"GPU": 0}}, r"contradict each other"),
        (ScalingConfig, {"use_gpu": True, "resources_per_worker": {"GPU": 1.5}}, r"'GPU': 1.5 is neither a whole"),
        (ScalingConfig, {"placement_strategy": "pack"}, r'placement_strategy\) must be one of "PACK"'),
        (
            ScalingConfig,
            {"placement_strategy": "STRICT_PACK", "spares": 1},
            r"spares\) keeps a node .* leave spares out",
        ),
        (ScalingConfig, {"use_tpu": True}, r"TPUs are not supported"),
        (ScalingConfig, {"engine": "slurm"}, r"engine\) must be one of \"local\", \"join\", \"ray\", not 'slurm'"),
        (ScalingConfig, {"listen": "7077"}, r"ScalingConfig\(listen\) must be of the form HOST:PORT"),
        (ScalingConfig, {"listen": 7077}, r"ScalingConfig\(listen\) must be of the form HOST:PORT"),
        (FailureConfig, {"max_failures": -2}, r"FailureConfig\(max_failures\).*-1 for any number"),
        (FailureConfig, {"progress_timeout_s": 0}, r"progress_timeout_s\) must be a number of seconds above 0"),
        (FailureConfig, {"progress_timeout_s": float("nan")}, r"progress_timeout_s\)"),
        (FailureConfig, {"fail_fast": True, "max_failures": 2}, r"fail_fast=True\) allows no retries"),
        (CheckpointConfig, {"target_overhead": 0}, r"target_overhead\) must be a share above 0 and up to 1"),
        (CheckpointConfig, {"target_overhead": 1.5}, "such as 0.02, not 1.5"),
        (CheckpointConfig, {"target_overhead": True}, "not True"),
        (CheckpointConfig, {"num_to_keep": 0}, r"num_to_keep\) must be .* 1 or more \(None keeps all\), not 0"),
        (CheckpointConfig, {"checkpoint_score_order": "best"}, r'must be one of "max", "min", not \'best\''),
        (CheckpointConfig, {"checkpoint_score_attribute": 3}, r"must be a metric's name, not 3"),
        (SyncConfig, {"sync_period": -1}, r"SyncConfig\(sync_period\)"),
        (SyncConfig, {"sync_artifacts": "yes"}, r"SyncConfig\(sync_artifacts\) must be True or False"),
        (RunConfig, {"name": "a/b"}, r"RunConfig\(name\) must not hold a slash.*storage_path"),
        (RunConfig, {"name": ""}, r"RunConfig\(name\) must be a non-empty string"),
        (RunConfig, {"name": ".."}, r"RunConfig\(name\) must do as a directory's name"),
        (RunConfig, {"name": "x" * 300}, r"RunConfig\(name\) is longer than 200 bytes"),
        (RunConfig, {"name": 3}, r"RunConfig\(name\) must be a non-empty string, not 3"),
        (RunConfig, {"storage_path": "ftp://host/x"}, r"unknown scheme ftp://"),
        (RunConfig, {"storage_path": 3}, r"RunConfig\(storage_path\) must be a path or a URI"),
        (RunConfig, {"storage_filesystem": object()}, r"storage_path\) is needed with storage_filesystem"),
        (RunConfig, {"failure_config": {"max_failures": 1}}, r"failure_config\) must be a FailureConfig, not dict"),
        (RunConfig, {"callbacks": [object()]}, r"derive it from holdfast.train.UserCallback"),
        (RunConfig, {"callbacks": UserCallback()}, r"must be a list of UserCallback"),
        (RunConfig, {"resume": "yes"}, r'RunConfig\(resume\) must be one of "auto", "never", "must"'),
        (RunConfig, {"log_to_file": ("a", "b", "c")}, r"log_to_file\) must be True, a file name, or a pair of them"),
        (RunConfig, {"log_to_file": 3}, r"log_to_file\) must be True, a file name, or a pair of them"),
        (RunConfig, {"log_to_file": "/var/log/out"}, r"log_to_file\) must name files below the run's directory"),
        (RunConfig, {"log_to_file": "../out"}, r"log_to_file\) must name files below the run's directory"),
        (RunConfig, {"log_to_file": ("out", "result.json")}, r"log_to_file\): 'result.json' is a name of the run"),
        (RunConfig, {"log_to_file": "a\0b"}, r"log_to_file\) must name files below the run's directory"),
        (RunConfig, {"log_to_file": ("out/err", "out")}, r"log_to_file\): 'out' cannot be a file and the directory of"),
        (RunConfig, {"logging_config": "INFO"}, r"logging_config\) must be a LoggingConfig, not str"),
        (LoggingConfig, {"log_level": "loud"}, r"must be a level of logging, such as \"WARNING\", not 'loud'"),
        (FailureConfig, {"preemption_grace_s": -1}, r"preemption_grace_s\) must be a number of seconds above 0"),
        (ScalingConfig, {"resources_per_worker": {"TPU": 1}}, r"TPUs are not supported"),
        (RunConfig, {"worker_runtime_env": {"env_vars": {"A": 1}}}, r"worker_runtime_env\) must be a dict such as"),
        (TorchConfig, {"backend": ""}, r'TorchConfig\(backend\) must be "gloo"'),
        (TorchConfig, {"timeout_s": None}, r"TorchConfig\(timeout_s\)"),
    ],
)
def test_a_mistake_is_named_with_its_field(kind: type[Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        kind(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.* has no effect")
def test_deprecated_settings_are_accepted(tmp_path: Path) -> None:
    run = RunConfig(
        name="run-1.b",
        local_dir=tmp_path,
        sync_config=SyncConfig(syncer=None, sync_on_checkpoint=False, upload_dir=tmp_path),
        failure_config=None,  # type: ignore[arg-type]
        log_to_file=True,
        progress_reporter=object(),
        verbose=0,
        callbacks=[UserCallback()],
        worker_runtime_env={"env_vars": {"A": "1"}, "pip": ["x"]},
    )
    assert run.failure_config == FailureConfig()
    assert ScalingConfig(trainer_resources={"CPU": 0}, accelerator_type="L4").num_workers == 1


def test_resources_per_worker() -> None:
    assert ScalingConfig().worker_resources == {"CPU": 1}
    assert ScalingConfig(num_workers=3, resources_per_worker={"CPU": 2}).total_resources == {"CPU": 6}
    assert ScalingConfig(num_workers=2, use_gpu=True).total_resources == {"GPU": 2}


def test_positional_arguments_mean_what_they_mean_in_ray() -> None:
    assert ScalingConfig(None, 3, False, {"CPU": 2}) == ScalingConfig(num_workers=3, resources_per_worker={"CPU": 2})
    assert FailureConfig(2) == FailureConfig(max_failures=2)
    assert CheckpointConfig(2, "loss", "min") == CheckpointConfig(
        num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    run = RunConfig("run", "/tmp/x", None, FailureConfig(1), CheckpointConfig(2), [], {"env_vars": {"A": "1"}})
    assert (run.failure_config.max_failures, run.checkpoint_config.num_to_keep) == (1, 2)


@pytest.mark.parametrize(("level", "quiet"), [("INFO", False), ("debug", False), ("Warning", True), ("ERROR", True)])
def test_a_log_level_above_info_is_quiet(level: str, quiet: bool) -> None:
    assert RunConfig(logging_config=LoggingConfig(log_level=level)).is_quiet is quiet


def test_verbose_0_is_quiet() -> None:
    assert RunConfig(verbose=0).is_quiet and not RunConfig(verbose=2).is_quiet
