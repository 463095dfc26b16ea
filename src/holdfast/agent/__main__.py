"""`python -m holdfast.agent --connect HOST:PORT --agent-id ID --slots N`: an agent as a process of its own.

The token comes through an inherited descriptor (`--token-fd`, as engines do), in a file that only its owner may
read (`--token-file`), or in HOLDFAST_TOKEN: never on the command line, where everybody could read it. The kernel
shows the environment that a process was started with in /proc as long as it lives, to children of the same user
too, so an agent that finds HOLDFAST_TOKEN starts itself over without it, under the same process id.
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

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m holdfast.agent", description="The agent of one node.")
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="where the controller listens")
    parser.add_argument("--agent-id", required=True, help="a name for this agent, unlike any other's")
    parser.add_argument("--slots", type=int, required=True, help="how many workers this node can hold; 0: any number")
    parser.add_argument("--tls-fingerprint", help="SHA-256 of the controller's certificate; needed off loopback")
    parser.add_argument("--token-fd", type=int, help="an inherited descriptor to read the run's token from")
    parser.add_argument("--token-file", type=Path, help="a file with the run's token, of mode 0600")
    parser.add_argument("--parent-pid", type=int, help="end when this process, the parent, ends")
    options = parser.parse_args(arguments)
    if options.token_fd is None and options.token_file is None and os.environ.get("HOLDFAST_TOKEN"):
        _start_over_without_token_in_environment()
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
    with suppress(PermissionError):  # the leader of a session already
        os.setsid()
    become_subreaper()
    name_process("hf-agent")
    handler = ThreadedHandler(sys.stderr)
    logging.basicConfig(level=logging.WARNING, format="holdfast agent: %(message)s", handlers=[handler])
    try:
        asyncio.run(_run(options, _read_token(options)))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (HoldfastError, FileExistsError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        handler.close()
    return 0


async def _run(options: argparse.Namespace, token: str) -> None:
    platform = Platform(options.connect, token, tls_fingerprint=options.tls_fingerprint, own_process=True)
    agent = Agent(options.agent_id, options.slots, platform)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, agent.shut_down)
    loop.add_signal_handler(signal.SIGINT, agent.shut_down)
    loop.add_signal_handler(signal.SIGHUP, agent.parent_died)
    await agent.run()


def _start_over_without_token_in_environment() -> NoReturn:
    """Replace this process by one that reads the token from a pipe."""
    reader, writer = os.pipe()
    os.write(writer, os.environ.pop("HOLDFAST_TOKEN").encode())
    os.close(writer)
    os.set_inheritable(reader, True)
    os.execv(sys.executable, [*sys.orig_argv, "--token-fd", str(reader)])


def _read_token(options: argparse.Namespace) -> str:
    os.environ.pop("HOLDFAST_TOKEN", None)  # another run's, if it is still there: nobody below needs it
    if options.token_fd is not None:
        with os.fdopen(options.token_fd) as file:
            token = file.read()
    elif options.token_file is not None:
        token = _read_private(options.token_file)
    else:
        token = ""
    if not token.strip():
        raise ConfigError("The agent has no token: give --token-file with the one that the run gave out.")
    return token.strip()


def _read_private(path: Path) -> str:
    try:
        with path.open() as file:
            found = os.fstat(file.fileno())
            if found.st_mode & 0o077 or found.st_uid not in (os.getuid(), 0):
                raise ConfigError(f"The token file {path} may be read by others: run chmod 600 {path}.")
            return file.read()
    except OSError as error:
        raise ConfigError(f"The token file {path} cannot be read: {error.strerror}.") from error


if __name__ == "__main__":
    code = main()
    # Threads may still wait for a storage that does not answer; nothing here is worth waiting for.
    sys.stderr.flush()
    os._exit(code)
