"""Functions that capture large objects are sent once or refused; large return values are left out."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
from blake3 import blake3
from tests.e2e.small import fit, make_trainer
from tests.faults.agent_harness import job_of, run_async, started_agent
from tests.faults.programs.sandbox import Sandbox

from holdfast.control.agent_link import FUNCTION_PIECE_BYTES
from holdfast.core import records as r
from holdfast.core.events import AgentPrepared
from holdfast.errors import ConfigError, TrainingFailedError
from holdfast.wire.messages import FunctionPiece
from holdfast.worker import bootstrap

_MIB = 1 << 20
_TABLE = numpy.arange(3 * _MIB // 8)


def test_a_function_that_captures_more_than_100_megabytes_runs(sandbox: Sandbox) -> None:
    captured: Any = numpy.full(128 * _MIB, 7, numpy.uint8)

    def function() -> int:
        return int(captured.sum(dtype=numpy.int64))

    assert fit(sandbox, function, workers=2).return_value == 7 * 128 * _MIB


@pytest.mark.parametrize("fork", [True, False], ids=["forked", "cold"])
def test_an_agent_puts_the_pieces_of_a_function_together(tmp_path: Path, fork: bool) -> None:
    captured = numpy.arange(5 * _MIB // 8)

    def function() -> int:
        return int(captured.sum())

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            data = job_of(function)
            first, rest = data[:FUNCTION_PIECE_BYTES], data[FUNCTION_PIECE_BYTES:]
            sizes: dict[str, Any] = {"size_bytes": len(data), "hash": blake3(data).hexdigest()}
            key = harness.send_prepare(first, fork=fork, **sizes)
            while rest:
                harness.send(FunctionPiece(key=key, data=rest[:FUNCTION_PIECE_BYTES]))
                rest = rest[FUNCTION_PIECE_BYTES:]
            await harness.expect(AgentPrepared)
            await harness.started(ranks=2)
            assert (await harness.finished()).value == int(captured.sum())
            os.kill(harness.zygote(), signal.SIGKILL)  # the next one gets the same memory
            await harness.stop()
            await harness.started(generation=2)
            assert (await harness.finished()).value == int(captured.sum())

    run_async(test)


def _cases() -> dict[str, tuple[Any, dict[str, Any] | None, str]]:
    local_table = _TABLE.copy()

    def with_closure() -> int:
        return int(local_table.sum())

    def outer() -> int:
        return with_closure()

    def plain(config: Any) -> int:
        return 0

    return {
        "captured": (with_closure, None, r"variable 'local_table' of .*with_closure, numpy.ndarray of 3.0 MiB"),
        "captured further down": (outer, None, r"the captured variable 'local_table'"),
        "configuration": (plain, {"table": _TABLE, "small": 1}, r"train_loop_config\['table'\]"),
        "partial": (functools.partial(plain, _TABLE), None, r"argument 0 of the functools.partial"),
    }


@pytest.mark.parametrize("case", list(_cases()))
def test_too_large_a_function_is_refused_naming_the_captured_object(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    function, config, named = _cases()[case]
    monkeypatch.setenv("HOLDFAST_FUNCTION_LIMIT_BYTES", str(_MIB))
    with pytest.raises(ConfigError, match=named) as raised:
        make_trainer(sandbox, function, config=config).fit()
    assert "larger than the 1.0 MiB" in str(raised.value)
    assert "HOLDFAST_FUNCTION_LIMIT_BYTES" in str(raised.value)
    assert not sandbox.storage.exists()


def test_a_limit_that_is_no_number_is_refused(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_FUNCTION_LIMIT_BYTES", "1 GiB")
    with pytest.raises(ConfigError, match="HOLDFAST_FUNCTION_LIMIT_BYTES must be a whole number"):
        fit(sandbox, lambda: None)


def test_a_return_value_that_is_too_large_does_not_fail_a_finished_run(
    sandbox: Sandbox, capfd: pytest.CaptureFixture[str]
) -> None:
    size_mib = (bootstrap.RETURN_VALUE_LIMIT_BYTES >> 20) + 1

    def function() -> str:
        return "x" * (size_mib << 20)

    result = fit(sandbox, function)
    assert result.return_value is None and result.error is None
    (finished,) = [record for record in sandbox.records() if isinstance(record, r.RunFinished)]
    assert finished.return_value_error is not None and f"it has {size_mib}.0 MiB" in finished.return_value_error
    assert capfd.readouterr().err.count(f"Warning: The return value is None: it has {size_mib}.0 MiB") == 1


class _KillsAgent:
    """The zygote that unpickles it kills its parent, the agent."""

    def __reduce__(self) -> Any:
        def kill() -> None:
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()

        return (kill, ())


def test_agents_that_die_while_loading_the_function_end_the_run(sandbox: Sandbox) -> None:
    bomb = _KillsAgent()

    def function() -> Any:
        return bomb

    with pytest.raises(TrainingFailedError, match=r"lost while it prepared the training function.*SIGKILL"):
        fit(sandbox, function)
    assert len([record for record in sandbox.records() if isinstance(record, r.AgentRemoved)]) == 1
