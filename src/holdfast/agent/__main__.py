"""`holdfast agent --join HOST:PORT`: an agent as a process of its own; engines start it as `python -m holdfast.agent`.

The run secret comes through an inherited descriptor (`--token-fd`, as engines do), in a file that only its owner may
read (`--token-file`), in HOLDFAST_TOKEN, or from this user's state directory (`storage.run_secret`): never on the
command line, where everybody could read it. The kernel shows the environment that a process was started with in /proc
as long as it lives, to children of the same user too, so an agent that finds HOLDFAST_TOKEN starts itself over without
it, under the same process id.

SIGTERM, Ctrl+C and the notice file drain an agent that has joined by itself (`Agent.drain`); one that an engine started
ends at once, since its driver ends too.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from holdfast.agent.agent import Agent
from holdfast.agent.forked_zygote import fork_zygote
from holdfast.agent.log_writer import ThreadedHandler
from holdfast.agent.notice_file import watch_notice_file
from holdfast.agent.platform import Platform
from holdfast.agent.zygote_client import ForkedZygote
from holdfast.errors import ConfigError, HoldfastError, Unreachable
from holdfast.linux.process import become_subreaper, die_with_parent, name_process
from holdfast.linux.resources import cpu_count
from holdfast.runtime import current
from holdfast.storage.run_secret import SECRET_VARIABLE, find_secret, read_secret_file, secret_path
from holdfast.wire.join_string import parse_join_string

__all__ = ["main"]


def main(arguments: list[str] | None = None, zygote: ForkedZygote | None = None) -> int:
    """The command. `zygote` is the first one, if it was forked already."""
    options = _make_parser().parse_args(arguments)
    if options.token_fd is None and options.token_file is None and os.environ.get(SECRET_VARIABLE):
        _start_over_without_secret_in_environment()
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
    with suppress(PermissionError):  # the leader of a session already, or of a group in a worker's session
        os.setsid()
    become_subreaper()
    name_process("hf-agent")
    if options.imports and zygote is None:
        # Before this process has a thread, or the run secret.
        zygote = fork_zygote(partial(os.close, options.token_fd) if options.token_fd is not None else _nothing)
    handler = ThreadedHandler(sys.stderr)
    logging.basicConfig(level=logging.WARNING, format="holdfast agent: %(message)s", handlers=[handler])
    try:
        asyncio.run(_run(options, _read_secret(options), zygote))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (HoldfastError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        handler.close()
    return 0


def _nothing() -> None:
    pass


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="holdfast agent",
        description="Run the workers of runs on this machine that are given to it by a driver on another.",
        epilog="The run secret is read from HOLDFAST_TOKEN, HOLDFAST_TOKEN_FILE, or the file `secret` of the state "
        "directory (~/.local/state/holdfast), and must be the driver's.",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--join", "--connect", dest="connect", metavar="HOST:PORT", help="where the driver listens")
    where.add_argument(
        "--join-file", type=Path, metavar="PATH", help="a file that says so, read again whenever it is dialled"
    )
    parser.add_argument(
        "--agent-id", default=socket.gethostname(), help="a name unlike any other agent's; the host's name"
    )
    parser.add_argument(
        "--slots", type=int, default=cpu_count(), help="how many workers this node can hold; 0: any number; its CPUs"
    )
    parser.add_argument(
        "--advertise", metavar="ADDRESS", help="where other nodes reach this one; the address that it dials from"
    )
    parser.add_argument(
        "--resources", default="{}", metavar="JSON", help="""what workers may ask for besides, such as '{"disk": 2}'"""
    )
    parser.add_argument(
        "--dial",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long to dial a driver that does not listen yet; 300",
    )
    parser.add_argument("--stay", action="store_true", help="wait for the next driver when one has ended")
    parser.add_argument(
        "--drain-deadline",
        type=float,
        default=os.environ.get("HOLDFAST_DRAIN_DEADLINE_S", "25"),
        metavar="SECONDS",
        help="how long the agent may take after SIGTERM, Ctrl+C or a notice to let its runs go elsewhere; "
        "HOLDFAST_DRAIN_DEADLINE_S, or 25",
    )
    parser.add_argument(
        "--notice-file",
        type=Path,
        default=os.environ.get("HOLDFAST_NOTICE_FILE") or None,
        metavar="PATH",
        help="when this file appears, the machine is about to be taken away: in so many seconds, at an ISO 8601 time, "
        "or when --drain-deadline says, if it is empty; HOLDFAST_NOTICE_FILE",
    )
    parser.add_argument("--token-file", type=Path, help="a file with the run secret, of mode 0600")
    parser.add_argument("--token-fd", type=int, help=argparse.SUPPRESS)  # an inherited descriptor to read it from
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)  # end when this process, the parent, ends
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], help=argparse.SUPPRESS
    )  # a module that workers will probably need
    parser.add_argument(
        "--comes-back", action="store_true", help=argparse.SUPPRESS
    )  # with a parent: connect again, too
    return parser


def _read_resources(text: str) -> dict[str, float]:
    try:
        found = msgspec.json.decode(text, type=dict[str, float])
    except msgspec.DecodeError as error:
        raise ConfigError(f'--resources must be JSON such as {{"disk": 2}}, not {text!r}: {error}.') from error
    if bad := [name for name, amount in found.items() if not 0 <= amount < float("inf")]:
        raise ConfigError(f"--resources must give amounts of 0 or more, but {bad[0]!r} has {found[bad[0]]:g}.")
    return found


async def _run(options: argparse.Namespace, secret: str, zygote: ForkedZygote | None) -> None:
    comes_back = options.parent_pid is None or options.join_file is not None or options.comes_back
    platform = Platform(
        parse_join_string(options.connect)
        if options.join_file is None
        else partial(_read_join_file, options.join_file),
        secret,
        advertise=options.advertise,
        resources=_read_resources(options.resources),
        dial_s=options.dial if comes_back else 0.0,
        own_process=True,
        comes_back=comes_back,
        zygote=zygote,
        imports=options.imports,
        stays=options.stay,
    )
    agent = Agent(options.agent_id, options.slots, platform)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, agent.parent_died)
    loop.add_signal_handler(signal.SIGUSR2, agent.dial_again)
    if options.parent_pid is not None and options.join_file is None:
        loop.add_signal_handler(signal.SIGTERM, agent.shut_down)
        loop.add_signal_handler(signal.SIGINT, agent.shut_down)
        await agent.run()
        return
    deadline_s = _check_deadline(options.drain_deadline)
    for number, why in ((signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl+C")):
        loop.add_signal_handler(number, _drain_at_signal, agent, why, deadline_s)
    watch = None
    if options.notice_file is not None:
        if options.notice_file.exists():
            raise ConfigError(
                f"The notice file {options.notice_file} says already that this machine is about to be taken away: "
                "remove it to start an agent here."
            )
        watch = asyncio.ensure_future(_drain_at_notice(agent, options.notice_file, deadline_s))
    try:
        await agent.run()
    finally:
        if watch is not None:
            watch.cancel()


def _drain_at_signal(agent: Agent, why: str, deadline_s: float) -> None:
    """The first signal drains the agent, the second ends it at once."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.shut_down)
    agent.drain(why, deadline_s)


async def _drain_at_notice(agent: Agent, path: Path, deadline_s: float) -> None:
    left_s = await watch_notice_file(path, current().now)
    agent.drain("notice file", deadline_s if left_s is None else left_s)


def _check_deadline(deadline_s: float) -> float:
    if not 0 <= deadline_s < 1e9:
        raise ConfigError(f"--drain-deadline must be a number of seconds of 0 or more, not {deadline_s:g}.")
    return deadline_s


def _read_join_file(path: Path) -> str:
    """The address in a file that somebody else replaces when another driver takes over."""
    try:
        return parse_join_string(path.read_text())
    except (OSError, ValueError) as error:
        raise Unreachable(f"{path} names no driver: {error}") from error


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
