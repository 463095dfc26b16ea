"""A host of a script that calls `fit()`: runs the script and an agent, and takes part in the election.

`election` decides. The script's process and this one talk over a socket pair (`rendezvous.launcher_messages`); the
agent reads where to connect from a file that is replaced whenever another leader accepts agents, so that its zygotes,
and what it is uploading, outlive a leader.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from holdfast.control.history import RUN_FILE, run_id
from holdfast.core.backoff import backoff_s
from holdfast.errors import StorageError
from holdfast.launch import election as el
from holdfast.launch.job import Job
from holdfast.launch.options import LaunchOptions
from holdfast.linux.process import die_with_parent
from holdfast.rendezvous.launcher_messages import (
    LAUNCHER_VARIABLE,
    DriverMessage,
    FitEnded,
    FitEntered,
    FitFenced,
    FitIsOver,
    LauncherMessage,
    Lead,
    Listening,
    PublishedRun,
    encode_line,
)
from holdfast.storage.locate import open_store
from holdfast.storage.run_secret import FILE_VARIABLE, SECRET_VARIABLE

__all__ = ["FitHost"]

_AGENT_RESTART_S = (1.0, 30.0)
_AGENT_ENDS_S = 60.0
_AGENT_DIALS_S = 10 * 365 * 86_400.0
"""The agent waits for a leader as long as this host does."""
_LINE_BYTES_MAX = 1024 * 1024
_log = logging.getLogger(__name__)


class FitHost:
    """One host. `run` returns the script's exit code."""

    def __init__(
        self, options: LaunchOptions, job: Job, command: list[str], directory: Path, secret_file: Path
    ) -> None:
        """`command` runs the script; `directory` is this process's own."""
        self._options = options
        self._job = job
        self._command = command
        self._join_file = directory / "join"
        self._secret_file = secret_file
        self._state = el.FitState(host=options.host_id)
        self._script: asyncio.subprocess.Process | None = None
        self._agent: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._joined = ""
        self._warned_of_storage = False
        self._stopped_by = 0

    async def run(self) -> int:
        ours, theirs = socket.socketpair()
        with theirs:
            self._script = await asyncio.create_subprocess_exec(
                *self._command,
                env={"HOLDFAST_ENGINE": "join"}
                | self._environment()
                | {LAUNCHER_VARIABLE: f"{os.getpid()}:{theirs.fileno()}"},
                pass_fds=[theirs.fileno()],
                process_group=0,  # the terminal's Ctrl+C comes once, from here
                preexec_fn=_die_with_launcher,
            )
        if self._stopped_by:  # while it was being started
            self._script.send_signal(self._stopped_by)
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=_LINE_BYTES_MAX)
        tasks = [
            asyncio.create_task(self._coordinate()),
            asyncio.create_task(self._receive(reader)),
            asyncio.create_task(self._keep_agent()),
        ]
        waiting = asyncio.create_task(self._script.wait())
        try:
            await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not waiting.done():
                    task.result()  # raises what ended it
            code = await waiting
            await self._publish_end(code)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end_processes()
            self._writer.close()
        return code if code >= 0 else 128 - code

    def stop(self, signum: int) -> None:
        """This host shall leave. A leader's script ends as it would by itself, and its agent after it; elsewhere the
        agent goes first, so that its runs can leave it without losing a step. A second signal ends both."""
        agent = self._agent if self._joined and not self._state.is_leading and not self._stopped_by else None
        self._stopped_by = signum
        process = agent if agent is not None and agent.returncode is None else self._script
        if process is not None and process.returncode is None:
            process.send_signal(signum)

    # ------------------------------------------------------------------ decisions

    async def _coordinate(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._job.changed.clear()
            self._write_join_file()
            self._state.may_campaign = self._may_campaign(loop)
            await self._look_for_storage()
            step = el.next_step(self._state, self._job.entries)
            if step is None or not await self._take(step):
                await self._job.changed.wait()

    def _may_campaign(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Where the rendezvous has lost its data, a leader that lives has one time-to-live to say so."""
        if self._job.reopened_at is None:
            return True
        left_s = self._job.reopened_at + self._options.rendezvous.ttl_s - loop.time()
        if left_s > 0:
            loop.call_later(left_s + 0.01, self._job.changed.set)
        return left_s <= 0

    async def _take(self, step: el.Step) -> bool:
        """Whether to decide again at once; otherwise after the next change, which this step makes."""
        job, state = self._job, self._state
        match step:
            case el.Campaign(fit):
                await job.create(f"fits/{fit}/leader", state.host.encode(), leased=True)
            case el.PutRun(fit, run):
                await job.put(f"fits/{fit}/run", msgspec.json.encode(run))
            case el.PutAddress(fit, address):
                await job.put(f"fits/{fit}/address", address.encode(), leased=True)
            case el.CreateResult(fit, result):
                await job.create(f"fits/{fit}/result", msgspec.json.encode(result))
            case el.SendLead(run):
                state.is_waiting, state.is_leading = False, True
                _say(f"{state.host} leads" + (f", after {run.host}." if run is not None else "."))
                self._send(self._lead_order(run))
                return True
            case el.SendResult(result):
                state.is_waiting = False
                self._send(FitIsOver(result=result))
                return True
        return False

    async def _look_for_storage(self) -> None:
        """A host that does not see what the leader has begun would begin anew."""
        state = self._state
        run = el.run_of(self._job.entries, state.fit)
        if run is None or not state.is_waiting or run.host == state.host:
            state.sees_storage = True
            return
        state.sees_storage = await asyncio.to_thread(_sees, run)
        if not state.sees_storage and not self._warned_of_storage:
            self._warned_of_storage = True
            _say(
                f"The storage {run.storage_path} of {run.host} is not seen by {state.host}: if {run.host} dies, the "
                "run can only wait until it is back. Use storage that all hosts share."
            )

    def _write_join_file(self) -> None:
        address = el.current_address(self._job.entries)
        if address is not None and address != self._joined:
            is_another, self._joined = bool(self._joined), address
            draft = self._join_file.with_suffix(".draft")
            draft.write_text(address)
            draft.rename(self._join_file)
            if self._agent is not None and self._agent.returncode is None and is_another:
                self._agent.send_signal(signal.SIGUSR2)

    # ------------------------------------------------------------------ the script

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            self._handle(msgspec.json.decode(line, type=DriverMessage))
            self._job.changed.set()
        await asyncio.Event().wait()  # the script's exit tells the rest

    def _handle(self, message: DriverMessage) -> None:
        state = self._state
        match message:
            case FitEntered(number=number):
                self._state = el.FitState(host=state.host, fit=number, is_waiting=True)
            case Listening(join=join, run=run):
                state.address = join
                state.run = msgspec.structs.replace(run, host=state.host)
            case FitFenced():
                state.is_leading, state.is_waiting, state.run = False, True, None
            case FitEnded(result=result):
                state.is_leading = False
                if result is not None:
                    run = msgspec.structs.replace(result.run, host=state.host)
                    state.result = msgspec.structs.replace(result, run=run)

    def _send(self, message: LauncherMessage) -> None:
        assert self._writer is not None
        self._writer.write(encode_line(message))

    def _lead_order(self, run: PublishedRun | None) -> Lead:
        options = self._options
        each = options.workers_per_host
        return Lead(
            address=options.address,
            run=run,
            workers=(options.min_hosts * each, options.max_hosts * each) if options.has_bounds else None,
            last_call_s=options.rendezvous.last_call_timeout_s,
        )

    async def _publish_end(self, code: int) -> None:
        """What the others need before this host leaves: the result; and whether who comes later begins another job."""
        state = self._state
        if state.result is not None:
            await self._job.create(f"fits/{state.fit}/result", msgspec.json.encode(state.result))
        if code == 0 or (state.result is not None and state.result.status != "finished"):
            await self._job.create("over", state.host.encode())

    # ------------------------------------------------------------------ the agent

    async def _keep_agent(self) -> None:
        """Run the agent, again if it ends by itself."""
        failures = 0
        while True:
            self._agent = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "holdfast.agent", "--join-file", str(self._join_file)),
                *("--agent-id", self._options.host_id, "--slots", str(self._options.workers_per_host)),
                *("--advertise", self._options.address, "--token-file", str(self._secret_file)),
                *("--parent-pid", str(os.getpid()), "--dial", str(_AGENT_DIALS_S), "--stay"),
                env=self._environment(),
                stdin=asyncio.subprocess.DEVNULL,
            )
            code = await self._agent.wait()
            if self._stopped_by:
                self.stop(self._stopped_by)
                await asyncio.Event().wait()  # for the script's exit
            failures += 1
            pause_s = backoff_s(failures, *_AGENT_RESTART_S)
            _log.warning("The agent has ended with code %d; another is started in %g s.", code, pause_s)
            await asyncio.sleep(pause_s)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in (SECRET_VARIABLE, LAUNCHER_VARIABLE)}
        return kept | {FILE_VARIABLE: str(self._secret_file)}

    async def _end_processes(self) -> None:
        for process in (self._script, self._agent):
            if process is None or process.returncode is not None:
                continue
            process.terminate()
            try:
                async with asyncio.timeout(_AGENT_ENDS_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def _die_with_launcher() -> None:
    die_with_parent(None, signal.SIGTERM)


def _sees(run: PublishedRun) -> bool:
    """Whether the run itself is there, not one of that name which this host has led in a directory of its own."""
    if not run.is_directory:
        return True
    try:
        found = run_id(open_store(run.storage_path).sub(run.name).get(RUN_FILE))
    except StorageError:
        return False
    return found in ("", run.id or found)


def _say(text: str) -> None:
    print(f"holdfast launch: {text}", file=sys.stderr, flush=True)
