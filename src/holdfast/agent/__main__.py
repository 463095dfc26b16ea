"""`python -m holdfast.agent --connect HOST:PORT --agent-id ID --slots N`: an agent as a process of its own.

The run secret comes through an inherited descriptor (`--token-fd`, as engines do), in a file that only its owner may
read (`--token-file`), in HOLDFAST_TOKEN, or from this user's state directory (`storage.run_secret`): never on the
command line, where everybody could read it. The kernel shows the environment that a process was started with in /proc
as long as it lives, to children of the same user too, so an agent that finds HOLDFAST_TOKEN starts itself over without
it, under the same process id.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from holdfast.agent.agent import Agent
from holdfast.agent.log_writer import ThreadedHandler
from holdfast.agent.platform import Platform
from holdfast.errors import ConfigError, HoldfastError
from holdfast.linux.process import become_subreaper, die_with_parent, name_process
from holdfast.storage.run_secret import SECRET_VARIABLE, find_secret, read_secret_file, secret_path

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m holdfast.agent", description="The agent of one node.")
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="where the controller listens")
    parser.add_argument("--agent-id", required=True, help="a name for this agent, unlike any other's")
    parser.add_argument("--slots", type=int, required=True, help="how many workers this node can hold; 0: any number")
    parser.add_argument("--token-fd", type=int, help="an inherited descriptor to read the run secret from")
    parser.add_argument("--token-file", type=Path, help="a file with the run secret, of mode 0600")
    parser.add_argument("--parent-pid", type=int, help="end when this process, the parent, ends")
    options = parser.parse_args(arguments)
    if options.token_fd is None and options.token_file is None and os.environ.get(SECRET_VARIABLE):
        _start_over_without_secret_in_environment()
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
    with suppress(PermissionError):  # the leader of a session already
        os.setsid()
    become_subreaper()
    name_process("hf-agent")
    handler = ThreadedHandler(sys.stderr)
    logging.basicConfig(level=logging.WARNING, format="holdfast agent: %(message)s", handlers=[handler])
    try:
        asyncio.run(_run(options, _read_secret(options)))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (HoldfastError, FileExistsError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        handler.close()
    return 0


async def _run(options: argparse.Namespace, secret: str) -> None:
    platform = Platform(options.connect, secret, own_process=True)
    agent = Agent(options.agent_id, options.slots, platform)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, agent.shut_down)
    loop.add_signal_handler(signal.SIGINT, agent.shut_down)
    loop.add_signal_handler(signal.SIGHUP, agent.parent_died)
    await agent.run()


def _start_over_without_secret_in_environment() -> NoReturn:
    """Replace this process by one that reads the secret from a pipe."""
    reader, writer = os.pipe()
    os.write(writer, os.environ.pop(SECRET_VARIABLE).encode())
    os.close(writer)
    os.set_inheritable(reader, True)
    os.execv(sys.executable, [*sys.orig_argv, "--token-fd", str(reader)])


def _read_secret(options: argparse.Namespace) -> str:
    os.environ.pop(SECRET_VARIABLE, None)  # another run's, if it is still there: nobody below needs it
    if options.token_fd is not None:
        with os.fdopen(options.token_fd) as file:
            secret: str | None = file.read().strip()
    elif options.token_file is not None:
        secret = read_secret_file(options.token_file)
    else:
        secret = find_secret()
    if not secret:
        raise ConfigError(
            f"The agent has no run secret: copy the file `secret` of the driver's state directory to {secret_path()}, "
            "or give it as --token-file."
        )
    return secret


if __name__ == "__main__":
    code = main()
    # Threads may still wait for a storage that does not answer; nothing here is worth waiting for.
    sys.stderr.flush()
    os._exit(code)
