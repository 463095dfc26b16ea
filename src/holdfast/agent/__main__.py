"""`python -m holdfast.agent --connect HOST:PORT --agent-id ID --slots N`: an agent as a process of its own.

The token comes in the environment (HOLDFAST_TOKEN) or through an inherited descriptor (HOLDFAST_TOKEN_FD),
never on the command line, where everybody could read it; it is taken out of the environment before anything is
started.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress

from holdfast.agent.agent import Agent
from holdfast.errors import HoldfastError
from holdfast.worker.kinship import become_subreaper, die_with_parent, name_process

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m holdfast.agent", description="The agent of one node.")
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="where the controller listens")
    parser.add_argument("--agent-id", required=True, help="a name for this agent, unlike any other's")
    parser.add_argument("--slots", type=int, required=True, help="how many workers this node can hold")
    parser.add_argument("--tls-fingerprint", help="SHA-256 of the controller's certificate")
    parser.add_argument("--parent-pid", type=int, help="end when this process, the parent, ends")
    options = parser.parse_args(arguments)
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
    with suppress(PermissionError):  # the leader of a session already
        os.setsid()
    become_subreaper()
    name_process("hf-agent")
    logging.basicConfig(level=logging.WARNING, format="holdfast agent: %(message)s")
    token = _take_token()
    if not token:
        print("The agent has no token: set HOLDFAST_TOKEN to the one that the run gave out.", file=sys.stderr)
        return 2
    try:
        asyncio.run(_run(options, token))
    except (HoldfastError, FileExistsError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def _run(options: argparse.Namespace, token: str) -> None:
    agent = Agent(
        options.connect,
        token,
        options.agent_id,
        options.slots,
        tls_fingerprint=options.tls_fingerprint,
        adopts_orphans=True,
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, agent.shut_down)
    loop.add_signal_handler(signal.SIGINT, agent.shut_down)
    await agent.run()


def _take_token() -> str:
    fd = os.environ.pop("HOLDFAST_TOKEN_FD", None)
    token = os.environ.pop("HOLDFAST_TOKEN", "")
    if fd is not None:
        with os.fdopen(int(fd)) as file:
            token = file.read()
    return token.strip()


if __name__ == "__main__":
    code = main()
    # Threads may still wait for a storage that does not answer; nothing here is worth waiting for.
    sys.stderr.flush()
    os._exit(code)
