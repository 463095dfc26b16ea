"""A channel between controller and agent that outlives its connections: nothing is lost or repeated when one breaks.

Each side numbers its messages, and keeps each until the other has acknowledged it. An acknowledgement rides on every
message, pings included; a side that only receives sends one of its own for each `_ACKNOWLEDGE_BYTES`. When a connection
breaks, the agent connects again; both sides say the number of the last message that they have (`OpenChannel`,
`ChannelOpened`), each sends the rest again, and what arrives twice is dropped. What is kept for a peer that does not
acknowledge is bounded by the sender: `backlog_bytes` says how much it is, and `drain` waits. The agent stops reading
from its workers then; the controller takes an agent that acknowledges nothing for lost after its silence limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import Any, Generic, TypeVar

from holdfast.errors import Unreachable, WireError
from holdfast.wire.channel import HANDSHAKE_TIMEOUT_S, Channel
from holdfast.wire.envelope import Envelope, Stamp
from holdfast.wire.frames import encode
from holdfast.wire.messages import Acknowledge, ChannelOpened, ChannelRefused, OpenChannel

__all__ = ["ChannelRefusedError", "ResumableChannel", "read_opening", "refuse"]

_ACKNOWLEDGE_BYTES = 512 * 1024
_WINDOW_BYTES = 4 * 1024 * 1024
"""`send` waits while more than this is not acknowledged. More than `_ACKNOWLEDGE_BYTES`, or it might wait for an
acknowledgement that is not due."""

_log = logging.getLogger(__name__)
_In = TypeVar("_In")


class ChannelRefusedError(WireError):
    """The controller knows nothing of this channel, or does not want the agent."""


class ResumableChannel(Generic[_In]):
    """Receives messages of the type `_In`, sends any. Used from one event loop; each connection is read by one task."""

    def __init__(self, agent: str, incarnation: str, *, comes_back: bool = False) -> None:
        """`incarnation` is like no other agent's, nor that of another channel of this one. `comes_back`: the agent
        connects again when a connection breaks."""
        self.agent = agent
        self.incarnation = incarnation
        self.comes_back = comes_back
        self.is_closed_by_peer = False
        """Whether the last connection was closed by the peer, or by the peer's kernel after its death."""
        self._stamp = Stamp(agent)
        self._channel: Channel[_In] | None = None
        self._closed = False
        self._sent = 0
        self._received = 0
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        """Number and frame of each message that the peer may not have."""
        self._backlog_bytes = 0
        self._acknowledged_at_bytes = 0
        """What the connection had received when the last acknowledgement was sent."""
        self._less = asyncio.Event()
        """Set whenever the backlog has become smaller."""

    @property
    def is_connected(self) -> bool:
        return self._channel is not None

    @property
    def peer(self) -> str:
        return "nobody" if self._channel is None else self._channel.peer

    @property
    def local_host(self) -> str:
        """This side's address on the connection: one at which the peer's network can reach this machine."""
        assert self._channel is not None
        return self._channel.local_host

    # ------------------------------------------------------------ connections

    async def join(self, channel: Channel[_In]) -> ChannelOpened:
        """For the agent: go on over this connection. Raises `ChannelRefusedError`, or `Unreachable` if it breaks."""
        received = None if self._sent == self._received == 0 else self._received
        try:
            channel.send_nowait(
                OpenChannel(incarnation=self.incarnation, received=received, comes_back=self.comes_back)
            )
            opened = await self._read_answer(channel)
        except BaseException:
            channel.abort()
            raise
        self._attach(channel, opened.received)
        return opened

    async def _read_answer(self, channel: Channel[_In]) -> ChannelOpened:
        envelope = None
        with suppress(TimeoutError):
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                envelope = await channel.recv()
        answer: Any = None if envelope is None else envelope.message
        if isinstance(answer, ChannelRefused):
            raise ChannelRefusedError(answer.reason)
        if not isinstance(answer, ChannelOpened):
            raise Unreachable("The controller did not open the agent's channel.")
        if not self.can_resume(answer.received):
            raise ChannelRefusedError(f"The controller has {answer.received} messages of {self._sent}.")
        return answer

    def accept(self, channel: Channel[_In], opening: OpenChannel, silence_s: float) -> None:
        """For the controller: go on over this connection, whose agent has sent `opening`; see `can_resume`."""
        channel.send_nowait(ChannelOpened(received=self._received, silence_s=silence_s))
        self._attach(channel, opening.received or 0)

    def can_resume(self, received: int) -> bool:
        """Whether this side still has all that the peer lacks, whose last message is the one of this number."""
        oldest = self._unacknowledged[0][0] if self._unacknowledged else self._sent + 1
        return oldest - 1 <= received <= self._sent

    def _attach(self, channel: Channel[_In], received: int) -> None:
        if self._channel is not None:
            self._channel.abort()
        self._channel = channel
        self.is_closed_by_peer = False
        self._acknowledged_at_bytes = channel.received_bytes
        self._forget(received)
        for _, frame in self._unacknowledged:
            channel.write_frame(frame)

    def disconnect(self) -> None:
        """End the connection at once, but not the channel."""
        if self._channel is not None:
            self._channel.abort()

    def abort(self) -> None:
        """End the channel at once; what is not acknowledged is lost."""
        self._end()
        if self._channel is not None:
            self._channel.abort()

    async def close(self) -> None:
        """Send what is queued, then end the channel. Closing twice is fine."""
        self._end()
        if self._channel is not None:
            await self._channel.close()

    def _end(self) -> None:
        self._closed = True
        self._unacknowledged.clear()
        self._backlog_bytes = 0
        self._less.set()

    # ------------------------------------------------------------ messages

    def send_nowait(self, message: Any, run: str = "") -> None:
        """Queue one message of a run, or of the agent itself. It arrives once, over whatever connection there will be;
        dropped when the channel is closed."""
        if self._closed:
            return
        self._sent += 1
        frame = encode(self._stamp.wrap(message, run, self._sent, self._received), type(message).__name__)
        self._unacknowledged.append((self._sent, frame))
        self._backlog_bytes += len(frame)
        self._write(frame)

    def signal(self, message: Any) -> None:
        """Send a message about the connection. Lost with it, or without one."""
        if self._channel is not None and not self._closed:
            self._write(encode(self._stamp.wrap(message, "", 0, self._received)))

    def _write(self, frame: bytes) -> None:
        if self._channel is not None:
            self._channel.write_frame(frame)
            self._acknowledged_at_bytes = self._channel.received_bytes

    async def send(self, message: Any, run: str = "") -> None:
        """Queue one message, and wait where the peer takes them too slowly."""
        self.send_nowait(message, run)
        await self.drain(_WINDOW_BYTES)

    async def drain(self, limit_bytes: int) -> None:
        """Wait until no more than this is not acknowledged, or the channel is closed."""
        while self._backlog_bytes > limit_bytes and not self._closed:
            self._less.clear()
            await self._less.wait()

    @property
    def backlog_bytes(self) -> int:
        """What was sent and is not acknowledged: how far the peer lags."""
        return self._backlog_bytes

    async def recv(self) -> Envelope[_In] | None:
        """The next message in its envelope, or None when the connection that there was at the call is over: closed,
        cut, given up for nonsense, or replaced by another."""
        channel = self._channel
        while channel is not None:
            envelope = await channel.recv()
            if channel is not self._channel:
                return None
            if envelope is None:
                self.is_closed_by_peer = channel.is_closed_by_peer
                channel.abort()
                self._channel = None
                return None
            if envelope.acknowledged > self._sent or envelope.sequence > self._received + 1:
                channel.give_up(
                    f"It sent message {envelope.sequence} where message {self._received + 1} comes next, "
                    f"and acknowledged message {envelope.acknowledged} of {self._sent}."
                )
                self._channel = None
                return None
            self._forget(envelope.acknowledged)
            if isinstance(envelope.message, Acknowledge):
                continue
            if envelope.sequence == 0:
                return envelope
            if envelope.sequence == self._received + 1:
                self._received = envelope.sequence
                if channel.received_bytes - self._acknowledged_at_bytes >= _ACKNOWLEDGE_BYTES:
                    self.signal(Acknowledge())
                return envelope
        return None

    def _forget(self, acknowledged: int) -> None:
        """The peer has everything up to this number."""
        kept = self._unacknowledged
        if kept and kept[0][0] <= acknowledged:
            while kept and kept[0][0] <= acknowledged:
                self._backlog_bytes -= len(kept.popleft()[1])
            self._less.set()


async def read_opening(channel: Channel[Any]) -> OpenChannel | None:
    """For the controller: the first message of an agent's connection; None if it is anything else, or does not come."""
    envelope = None
    with suppress(TimeoutError):
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            envelope = await channel.recv()
    return envelope.message if envelope is not None and isinstance(envelope.message, OpenChannel) else None


async def refuse(channel: Channel[Any], reason: str) -> None:
    """For the controller: tell an agent that has sent `OpenChannel` why it may not go on."""
    _log.warning("Agent %s at %s is refused: %s", channel.agent, channel.peer, reason)
    channel.send_nowait(ChannelRefused(reason=reason))
    await channel.close()
