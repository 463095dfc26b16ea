"""The actor that has an agent as its child process. Runs on the cluster's nodes.

The agent is a process of its own, since it is the subreaper of its workers and outlives its connections. The kernel
ends it when the thread that started it ends: Ray calls a method of such an actor in the main thread, which waits there
until the agent has ended.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable

from holdfast.engines.agent_process import exit_phrase, secret_pipe
from holdfast.storage.run_secret import SECRET_VARIABLE

__all__ = ["AgentActor", "assigned_gpus"]

_LINES_KEPT = 20


def assigned_gpus() -> list[str]:
    """The GPUs that Ray has assigned to the bundle in which this is called, as CUDA_VISIBLE_DEVICES names them."""
    import ray

    return [str(one) for one in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


class AgentActor:
    """Made into an actor by `cluster.start_agent`."""

    def run(self, arguments: list[str], secret: str, *further_gpus: list[str]) -> str:
        """Run an agent to its end, with the GPUs of this actor's bundle and of the others that are the agent's; how it
        ended, as a phrase for people."""
        gpus = dict.fromkeys([*assigned_gpus(), *(gpu for one in further_gpus for gpu in one)])
        environment = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        with secret_pipe(secret) as token_fd:
            process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.agent", *arguments]
                + ["--parent-pid", str(os.getpid()), "--token-fd", str(token_fd)],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                pass_fds=[token_fd],
                start_new_session=True,
            )
        threading.Thread(target=_end_with_raylet, args=(os.getppid(), process), daemon=True).start()
        assert process.stderr is not None
        last = _forward(process.stderr)
        code = process.wait()
        return exit_phrase(code) + (f": {last}" if code > 0 and last else "")


def _end_with_raylet(raylet_pid: int, process: subprocess.Popen[str]) -> None:
    """Tell the agent that its parent has died when the node's raylet has: an actor that waits in a method does not end
    then, and nobody else would end either of them."""
    try:
        raylet = os.pidfd_open(raylet_pid)
    except ProcessLookupError:
        process.send_signal(signal.SIGHUP)
        return
    try:
        poll = select.poll()
        poll.register(raylet, select.POLLIN)
        poll.poll()
    finally:
        os.close(raylet)
    process.send_signal(signal.SIGHUP)


def _forward(lines: Iterable[str]) -> str:
    """Print what the agent prints, and give its last line, which says why it failed."""
    kept: deque[str] = deque(maxlen=_LINES_KEPT)
    for line in lines:
        print(line, end="", file=sys.stderr, flush=True)
        if line.strip():
            kept.append(line.strip())
    return kept[-1] if kept else ""
