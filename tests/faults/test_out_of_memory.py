"""Memory runs out inside a control group: a worker is killed, never the agent, which holds accepted snapshots."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.agent_harness import job_of, run_async, started_agent
from tests.faults.memory_group import memory_group
from tests.faults.programs.exact import ends
from tests.faults.programs.sandbox import Sandbox

from holdfast.core import records as r

_MIB = 1 << 20


def _score() -> list[int]:
    return [int(Path("/proc/self/oom_score_adj").read_text())]


@pytest.mark.parametrize("fork", [True, False], ids=["forked", "cold"])
def test_the_oom_killer_prefers_workers_to_agent_and_zygote(tmp_path: Path, fork: bool) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(_score), fork=fork)
            await harness.started()
            ((worker,), zygote) = (await harness.finished()).value, harness.zygote()
            for pid in (harness.process.pid, zygote):
                own = int(Path(f"/proc/{pid}/oom_score_adj").read_text())
                assert own < worker or own == 1000

    run_async(test)


@pytest.mark.hosts
def test_the_memory_limit_of_a_parent_control_group_counts() -> None:
    program = "from holdfast.linux.memory import available_bytes; print(available_bytes())"
    with memory_group(300 * _MIB) as group:
        done = subprocess.run(
            [sys.executable, "-c", program], preexec_fn=group.enter, stdout=subprocess.PIPE, text=True, check=True
        )
    assert 100 * _MIB < int(done.stdout) < 300 * _MIB


@pytest.mark.hosts
def test_a_worker_killed_by_the_oom_killer_is_restarted(sandbox: Sandbox) -> None:
    """Six small workers eat at the same time, while the agent holds snapshots and is larger than any of them."""
    with memory_group(900 * _MIB) as group:
        driver = sandbox.start_driver(
            {"snapshot_bytes": 150 * _MIB},
            {"HOLDFAST_SNAPSHOT_LIMIT_BYTES": str(6 * 310 * _MIB)},  # each slot may have a sixth of it
            job="eat_memory",
            workers=6,
            failure={"max_failures": 2},
            cgroup_procs=str(group.inner / "cgroup.procs"),
        )
        assert driver.value() == "recovered"
    raised, killed = ends(sandbox)
    assert "the first generation is over" in raised.why
    assert "out of memory" in killed.why
    assert not [record for record in sandbox.records() if isinstance(record, r.AgentRemoved)]
