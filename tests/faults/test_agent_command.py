"""`python -m holdfast.agent` as a command: how it gets the run secret, what it refuses, what others can see of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.agent_harness import open_channel
from tests.faults.programs import processes
from tests.faults.programs.sandbox import Sandbox

from holdfast.core.events import AgentJoined
from holdfast.engines.engine import ControllerEndpoint
from holdfast.storage.run_secret import make_secret
from holdfast.wire.channel import Channel, serve
from holdfast.wire.messages import AgentMessage


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "holdfast.agent", "--agent-id", "a1", "--slots", "1", *arguments]


def _refusal(sandbox: Sandbox, *arguments: str, **environment: str) -> tuple[int, str]:
    environment = {**os.environ, **environment}
    done = subprocess.run(
        _command(*arguments), check=False, env=environment, capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr
    assert list(sandbox.cache.glob("agents/*")) == []
    return done.returncode, done.stderr


def _visible(pid: int) -> bytes:
    """What any process of the same user can read of another: its first environment and its command line."""
    return Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("way", ["environment", "file"])
def test_the_secret_of_a_running_agent_is_not_in_environment_or_arguments(
    sandbox: Sandbox, tmp_path: Path, way: str
) -> None:
    """Neither in /proc/<pid>/environ nor on the command line, of the agent and of everything below it."""
    secret = make_secret()
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text(f"{secret}\n")

    async def look() -> None:
        hello: asyncio.Future[AgentJoined] = asyncio.get_running_loop().create_future()

        async def on_agent(channel: Channel[AgentMessage]) -> None:
            resumable = await open_channel(channel)
            found = await resumable.recv()
            assert found is not None and isinstance(found.message, AgentJoined)
            hello.set_result(found.message)
            await resumable.recv()

        server = await serve("127.0.0.1", 0, secret, on_agent)
        arguments = ["--connect", f"127.0.0.1:{server.port}"]
        environment = {"HOLDFAST_TOKEN": secret} if way == "environment" else {}
        if way == "file":
            arguments += ["--token-file", str(tmp_path / "token")]
        agent = subprocess.Popen(_command(*arguments), env={**os.environ, **environment})
        try:
            assert (await asyncio.wait_for(hello, 60)).pid == agent.pid
            everyone = [agent.pid, *processes.children(agent.pid)]
            assert len(everyone) == 2, "the agent has its zygote"
            assert [pid for pid in everyone if secret.encode() in _visible(pid)] == []
        finally:
            await server.close()
            agent.send_signal(signal.SIGTERM)
            await asyncio.to_thread(agent.wait)

    asyncio.run(look())


def test_the_repr_of_an_endpoint_hides_the_secret() -> None:
    assert "secret" not in repr(ControllerEndpoint("127.0.0.1:1", "secret"))


def test_an_agent_without_a_secret_fails_with_a_clear_error(sandbox: Sandbox, tmp_path: Path) -> None:
    code, error = _refusal(sandbox, "--connect", "127.0.0.1:9")
    assert code == 2 and "has no run secret" in error
    code, error = _refusal(sandbox, "--connect", "127.0.0.1:9", "--token-file", str(tmp_path / "missing"))
    assert code == 2 and "missing cannot be read: No such file" in error


def test_a_token_file_that_others_may_read_is_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "token").chmod(0o640)
    code, error = _refusal(sandbox, "--connect", "127.0.0.1:9", "--token-file", str(tmp_path / "token"))
    assert code == 2 and "chmod 600" in error
