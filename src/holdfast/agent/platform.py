"""What an agent asks of the machine that it runs on: its connection, its directory, processes, sockets and storage.

`agent`, `run_host` and `worker_group` ask for these here, and `holdfast.runtime` for clock and threads. The simulator
(`tests/sim`) gives them a platform of its own, on which nothing is a process or a socket.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.agent.buffers import Buffers, SnapshotMemory
from holdfast.agent.installed_torch import installed_torch
from holdfast.agent.output import RankLog
from holdfast.agent.session_dir import SessionDir
from holdfast.agent.spawner import Spawners
from holdfast.agent.worker_handle import OnMessage, WorkerHandle
from holdfast.agent.worker_process import WorkerProcess
from holdfast.agent.zygote_client import ForkedZygote, Zygotes
from holdfast.core.backoff import backoff_s
from holdfast.core.commands import Neighbour
from holdfast.errors import Unreachable, WireError
from holdfast.linux.memory import OomKills
from holdfast.linux.process import change_death_signal, live_without_parent
from holdfast.linux.resources import cpu_count, memory_bytes, visible_gpus
from holdfast.runtime import current
from holdfast.storage.local_cache import local_cache_dir
from holdfast.storage.store import Store
from holdfast.streaming.messages import ServedStorage
from holdfast.wire.channel import Channel, connect, connect_client
from holdfast.wire.control_messages import ControlReply, FindStorage
from holdfast.wire.hello import Hello
from holdfast.wire.join_string import parse_address
from holdfast.wire.messages import ControllerMessage, PrepareRun, StorageProbe, StorageServed
from holdfast.wire.resumable_channel import ChannelRefusedError, ResumableChannel
from holdfast.worker.job import Assignment
from holdfast.worker.stdio import detach_output

if TYPE_CHECKING:
    from holdfast.agent.snapshot_fetch import NeighbourMemory
    from holdfast.agent.snapshot_server import ServedSnapshots
    from holdfast.streaming.server import StorageServer

__all__ = ["MasterPort", "Platform", "linger_s"]

_LOOK_FOR_SERVER_S = (0.1, 2.0)
"""The first pause between two attempts to reach the next driver, and the longest."""
_NEIGHBOUR_TIMEOUT_S = 10.0
"""Another node that sends nothing for so long is not waited for: storage has what it has."""
_log = logging.getLogger(__name__)


def linger_s() -> float:
    """How long an agent may take to finish uploads when its controller has died (HOLDFAST_LINGER_S)."""
    return float(os.environ.get("HOLDFAST_LINGER_S", "60"))


class MasterPort:
    """The port at which the next generation's rank 0 will listen: bound now, so that nobody else gets it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener = self._bind()

    @property
    def number(self) -> int:
        return int(self._listener.getsockname()[1])

    def hand_over(self, number: int) -> int | None:
        """The listening socket's descriptor, for rank 0, if it has this number; another port takes its place."""
        if number != self.number:
            return None
        listener, self._listener = self._listener, self._bind()
        return listener.detach()

    def close(self) -> None:
        self._listener.close()

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        try:
            return socket.create_server((self._address, 0), family=family, backlog=512)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            # Others reach this machine at an address that it does not have itself (NAT, a container's host).
            return socket.create_server(("", 0), family=family, backlog=512)


class Platform:
    """The real machine."""

    def __init__(
        self,
        connect_to: str | Callable[[], str],
        secret: str,
        *,
        advertise: str | None = None,
        resources: Mapping[str, float] | None = None,
        dial_s: float = 0.0,
        root: Path | None = None,
        spawners: Spawners | None = None,
        own_process: bool = False,
        comes_back: bool = False,
        zygote: ForkedZygote | None = None,
        imports: Sequence[str] = (),
        stays: bool = False,
    ) -> None:
        """`connect_to` is the controller's address, or finds it out at each dial, and may raise `Unreachable`.
        `advertise` is the address at which other machines reach this one, where that is not the one that it dials
        from. `resources` are besides, or instead of, those that are found. A controller that cannot be reached at first
        is dialled again for `dial_s`. `own_process`: the agent is a process of its own and a subreaper, and has no
        children but its zygotes. `comes_back`: it outlives its connections and its controller; others end with the
        first. `zygote`: its first one, if there is one already; what is started imports `imports` at once.
        `stays`: it comes back also when it is told to end."""
        self._connect_to = connect_to
        self._connected_to = ""
        """Where the present channel was opened; "" before."""
        self._secret = secret
        self._oom_kills = OomKills()
        self.stays = stays
        self.advertise = advertise
        self._resources = dict(resources or {})
        self.dial_s = dial_s
        self._root = root
        self._spawners = spawners
        self._own_process = own_process
        self._comes_back = comes_back
        self._zygote = zygote
        self._imports = imports
        self.linger_s = linger_s()

    async def connect(self, agent: str) -> Channel[ControllerMessage]:
        """Connect to the controller as the agent of this name."""
        hello = Hello(agent=agent, address=self.advertise or "")
        address = self._find_controller()
        if self._connected_to not in ("", address):
            raise ChannelRefusedError(
                f"Another driver, at {address}, has taken over from the one at {self._connected_to}."
            )
        channel = await connect(address, self._secret, hello)
        self._connected_to = address
        return channel

    def _find_controller(self) -> str:
        return self._connect_to if isinstance(self._connect_to, str) else self._connect_to()

    @property
    def follows_drivers(self) -> bool:
        """Whether drivers take over from each other, at other addresses; one that has no use for this agent yet may
        have later."""
        return not isinstance(self._connect_to, str)

    def make_channel(self, agent: str) -> ResumableChannel[ControllerMessage]:
        """A channel to the controller that has no connection yet."""
        self._connected_to = ""
        return ResumableChannel(agent, current().token_hex(8), comes_back=self._comes_back)

    def open_session(self, agent: str) -> SessionDir:
        return SessionDir(agent, self._root)

    def open_snapshot_memory(self) -> SnapshotMemory:
        """How much memory the snapshots of all runs may take on this node."""
        return SnapshotMemory()

    def make_buffers(self, slots: int, memory: SnapshotMemory) -> Buffers:
        """The buffers of one run, of whose workers on this node each has its share."""
        return Buffers(slots, memory)

    def find_torch(self) -> str | None:
        """The version of torch that workers here would import, for `AgentJoined`; an agent that does not come back has
        the driver's installation."""
        return installed_torch() if self._comes_back else None

    def find_resources(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """What this node has for workers, and the ids of its GPUs."""
        return {"CPU": cpu_count(), "memory": memory_bytes()} | self._resources, tuple(visible_gpus())

    def make_spawners(self, session: SessionDir) -> Spawners:
        if self._spawners is not None:
            return self._spawners
        zygotes = Zygotes(session.leftovers, adopts_orphans=self._own_process)
        zygotes.launch(self._zygote, self._imports)
        return zygotes

    def open_worker(
        self, assignment: Assignment, log: RankLog, listen_fd: int | None, on_message: OnMessage
    ) -> WorkerHandle:
        """The agent's end of a worker that is about to be spawned; `listen_fd` is the worker's from then on."""
        return WorkerProcess(assignment.rank, log, listen_fd, on_message)

    def open_master_port(self, address: str) -> MasterPort:
        return MasterPort(address)

    def work_dir(self, path: str) -> str:
        """Where workers run; a relative path is below this node's cache."""
        return path if os.path.isabs(path) else str(local_cache_dir() / "work" / path)  # noqa: PTH117

    def sees_storage(self, probe: StorageProbe) -> bool:
        """Whether this machine sees the directory that the controller means, and not another of that name; may
        block."""
        try:
            return probe.text.encode() in Path(probe.file).read_bytes()
        except OSError:
            return False

    def find_server(self, answer: StorageServed) -> ServedStorage:
        """Where this machine reaches the storage server: it listens where the controller does."""
        return _server_at(self._connected_to, answer)

    @asynccontextmanager
    async def find_next_server(self, root: str, tokens: Sequence[str]) -> AsyncIterator[ServedStorage | None]:
        """Where a directory of the driver that died is served by the next one, which is waited for. It leaves the
        drafts of these tokens open for as long as the block takes. None if nobody serves it any more."""
        failures = 0
        while self._comes_back:  # others end with their driver
            try:
                channel, served = await self._ask_for_server(root, tokens)
            except WireError:
                failures += 1
                await asyncio.sleep(backoff_s(failures, *_LOOK_FOR_SERVER_S))
                continue
            try:
                yield served
            finally:
                await channel.close()
            return
        yield None

    async def _ask_for_server(
        self, root: str, tokens: Sequence[str]
    ) -> tuple[Channel[ControlReply], ServedStorage | None]:
        """Ask the controller that can be reached now; the connection is to be closed by the caller."""
        address = self._find_controller()
        channel = await connect_client(address, self._secret)
        try:
            await channel.send(FindStorage(root=root, tokens=tuple(tokens)))
            envelope = await channel.recv()
            if envelope is None:
                raise Unreachable(f"The controller at {address} has hung up.")
        except BaseException:
            await channel.close()
            raise
        answer = envelope.message
        return channel, _server_at(address, answer) if isinstance(answer, StorageServed) else None

    def open_streamed(self, order: PrepareRun, find_server: Callable[[], ServedStorage]) -> Store:
        """The run's storage where this machine does not see it."""
        from holdfast.storage.locate import open_store
        from holdfast.streaming.client import open_streamed

        return open_streamed(find_server(), open_store(order.storage).uri, find_server)

    def serve_snapshots(self, files: ServedSnapshots, address: str, key: str) -> StorageServer:
        """Let other nodes read this one's snapshots. May block, and raises `OSError` or `HoldfastError`."""
        from holdfast.agent.snapshot_server import serve_snapshots

        return serve_snapshots(files, address, key)

    def open_neighbour(self, neighbour: Neighbour, key: str, token: str) -> NeighbourMemory:
        """What another node has in memory of the checkpoint of this token."""
        from holdfast.streaming.client import StreamedStore

        served = ServedStorage(root=neighbour.agent, host=neighbour.address, port=neighbour.port, key=key)
        return StreamedStore(served, timeout_s=_NEIGHBOUR_TIMEOUT_S).sub(token)

    def open_store(self, order: PrepareRun) -> Store:
        """The run's storage where this machine sees it; may block."""
        from holdfast.storage.locate import open_store

        filesystem = None
        if order.filesystem is not None:
            import cloudpickle

            filesystem = cloudpickle.loads(order.filesystem)
        return open_store(order.storage, filesystem)

    def oom_kills(self) -> int:
        """How many processes the kernel has killed for want of memory so far."""
        return self._oom_kills.count()

    def sweep_cache(self) -> None:
        """Remove what is too much or too old in the node's cache of checkpoints, in a thread."""
        threading.Thread(target=_sweep_cache, name="holdfast-sweep", daemon=True).start()

    # ------------------------------------------------------------------ when the controller dies

    def outlive_controller(self) -> None:
        """The controller's connection has ended: do not die with its process. That may be a moment later, when this
        process has told its zygote that it removes its files itself. An agent that comes back goes on dying with its
        parent, which is not the controller."""
        if self._own_process and not self._comes_back:
            live_without_parent()

    def end_by_itself(self) -> None:
        """The agent was told to end. Its zygote will not remove its files any more, so it must not die with its parent
        while it does so itself."""
        if self._own_process:
            live_without_parent()

    def choose_death_signal(self, *, has_uploads: bool) -> None:
        """Choose what the kernel sends this process when the controller's dies: SIGKILL, or SIGHUP while there are
        uploads to finish."""
        if self._own_process and self.linger_s > 0:
            change_death_signal(signal.SIGHUP if has_uploads else signal.SIGKILL)

    def detach_output(self) -> None:
        """Let go of the controller's terminal."""
        if self._own_process:
            detach_output()


def _server_at(controller: str, answer: StorageServed) -> ServedStorage:
    host, _ = parse_address(controller, "The controller's address")
    return ServedStorage(root=answer.root, host=host, port=answer.port, key=answer.key)


def _sweep_cache() -> None:
    from holdfast.checkpoint.cache import sweep_cache

    try:
        sweep_cache()
    except OSError as error:
        _log.warning("The checkpoint cache could not be swept: %s", error)
