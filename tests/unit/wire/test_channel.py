"""The channel over real sockets: authenticated peers talk; others lose their connection and disturb nobody."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from holdfast.core.checkpoint_types import Report
from holdfast.core.commands import AnnounceCheckpoint
from holdfast.core.events import RankReported, Ticket, WorkersStopped
from holdfast.errors import WireError
from holdfast.wire import auth, channel
from holdfast.wire.channel import Channel, connect, serve
from holdfast.wire.envelope import Envelope, Stamp
from holdfast.wire.frames import HEADER_BYTES, Splitter, encode
from holdfast.wire.messages import AgentMessage, Collected, ControllerMessage, Ping, Pong, Shutdown
from holdfast.wire.tls import make_identity

TOKEN = "correct horse"


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


class Door:
    """A controller that collects the messages of agents and answers with a greeting."""

    def __init__(self) -> None:
        self.got: asyncio.Queue[AgentMessage | None] = asyncio.Queue()

    async def __call__(self, agent: Channel[AgentMessage]) -> None:
        agent.send_nowait(Ping())
        while (envelope := await agent.recv()) is not None:
            self.got.put_nowait(envelope.message)
        self.got.put_nowait(None)


async def _message(channel: Channel[ControllerMessage]) -> ControllerMessage:
    envelope = await channel.recv()
    assert envelope is not None
    return envelope.message


async def raw_challenge(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, auth.Challenge]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    header = await reader.readexactly(HEADER_BYTES)
    body = await reader.readexactly(int.from_bytes(header, "big"))
    return reader, writer, msgspec.msgpack.decode(body, type=auth.Challenge)


@pytest.mark.parametrize("with_tls", [False, True])
def test_messages_go_both_ways_and_close_ends_the_channel(with_tls: bool) -> None:
    async def test() -> None:
        identity = make_identity() if with_tls else None
        door = Door()
        server = await serve("127.0.0.1", 0, TOKEN, door, identity)
        agent = await connect(f"127.0.0.1:{server.port}", TOKEN, identity.fingerprint if identity else None, agent="a")
        assert await _message(agent) == Ping()
        for generation in range(1000):
            await agent.send(WorkersStopped(generation=generation, agent="a", master_port=1))
        for generation in range(1000):
            assert await door.got.get() == WorkersStopped(generation=generation, agent="a", master_port=1)
        await agent.close()
        assert await door.got.get() is None
        await server.close()

    run(test)


def test_large_messages_pass_and_a_limit_closes(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        door = Door()
        server = await serve("127.0.0.1", 0, TOKEN, door, limit_bytes=3_000_000)
        agent = await connect(f"127.0.0.1:{server.port}", TOKEN, agent="a")
        large = RankReported(generation=1, rank=0, reports=(Report(number=1, at=0.0, metrics={"x": "y" * 2_000_000}),))
        await agent.send(large)
        assert await door.got.get() == large
        await agent.send(
            RankReported(generation=1, rank=0, reports=(Report(number=1, at=0.0, metrics={"x": "y" * 4_000_000}),))
        )
        assert await door.got.get() is None
        await agent.recv()
        assert await agent.recv() is None
        await server.close()

    run(test)
    assert [r.message for r in caplog.records if "at most 3000000" in r.message]


@pytest.mark.parametrize(
    ("name", "sequence", "why"),
    [
        ("a", 2, "message 2 where message 1 comes next"),
        ("a", 0, "message 0 where message 1 comes next"),
        ("b", 1, "a message of agent 'b' on the connection of 'a'"),
    ],
)
def test_a_lost_repeated_or_foreign_message_closes_the_connection(
    name: str, sequence: int, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        door = Door()
        server = await serve("127.0.0.1", 0, TOKEN, door)
        agent = await connect(f"127.0.0.1:{server.port}", TOKEN, agent="a")
        assert await _message(agent) == Ping()
        monkeypatch.setattr(Stamp, "wrap", lambda _, message, run: Envelope(run, name, sequence, message))
        await agent.send(Pong())
        assert await door.got.get() is None
        assert await agent.recv() is None
        await agent.close()
        await server.close()

    run(test)
    assert [record.message for record in caplog.records if why in record.message]


def test_a_wrong_token_is_refused_in_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        server = await serve("127.0.0.1", 0, TOKEN, Door())
        with pytest.raises(WireError, match="token is not this run's"):
            await connect(f"127.0.0.1:{server.port}", "wrong", agent="a")
        await server.close()

    run(test)
    assert len(caplog.records) == 1


def test_another_protocol_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        server = await serve("127.0.0.1", 0, TOKEN, Door())
        honest = auth.prove
        monkeypatch.setattr(auth, "prove", lambda *a: msgspec.structs.replace(honest(*a), protocol=99))
        with pytest.raises(WireError, match="protocol 2 and the agent protocol 99"):
            await connect(f"127.0.0.1:{server.port}", TOKEN, agent="a")
        await server.close()

    run(test)


def test_a_controller_without_the_token_is_rejected() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(auth.make_challenge()))
        await reader.readexactly(HEADER_BYTES)
        writer.write(encode(auth.Accepted(mac=b"x" * 32)))
        await writer.drain()
        writer.close()

    async def test() -> None:
        listener = await asyncio.start_server(impostor, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(WireError, match="does not know this agent's token"):
            await connect(f"127.0.0.1:{port}", TOKEN, agent="a")
        listener.close()

    run(test)


def test_a_replayed_proof_is_refused() -> None:
    async def test() -> None:
        server = await serve("127.0.0.1", 0, TOKEN, Door())
        _, first, challenge = await raw_challenge(server.port)
        recorded = encode(auth.prove(challenge, TOKEN, "", "a"))
        first.write(recorded)
        reader, second, _ = await raw_challenge(server.port)
        second.write(recorded)
        answer = Splitter().feed(await reader.read())[0]
        assert msgspec.msgpack.decode(answer)["type"] == "Rejected"
        first.close()
        second.close()
        await server.close()

    run(test)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0\0\0\x05hello",
        b"\0\0\x10\x01",
        encode({"type": "Proof"}),
        b"\0\0\0\x08\x81\xa4type\xa1\xff",  # not UTF-8
        b"\0\0\x0f\xff" + b"\x91" * 0x0FFF,  # nested beyond all measure
    ],
)
def test_garbage_closes_that_connection_and_nothing_else(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        door = Door()
        server = await serve("127.0.0.1", 0, TOKEN, door)
        agent = await connect(f"127.0.0.1:{server.port}", TOKEN, agent="a")
        reader, stranger, _ = await raw_challenge(server.port)
        stranger.write(garbage)
        with suppress(ConnectionError):  # a reset is an end too
            assert await reader.read() == b""
        stranger.close()
        await agent.send(WorkersStopped(generation=7, agent="a", master_port=1))
        assert await door.got.get() == WorkersStopped(generation=7, agent="a", master_port=1)
        await agent.close()
        await server.close()

    run(test)
    assert len(caplog.records) == 1


def test_a_message_of_the_wrong_direction_ends_the_channel() -> None:
    async def test() -> None:
        door = Door()
        server = await serve("127.0.0.1", 0, TOKEN, door)
        agent = await connect(f"127.0.0.1:{server.port}", TOKEN, agent="a")
        await agent.send(Shutdown())
        assert await door.got.get() is None
        await agent.close()
        await server.close()

    run(test)


def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.05)

    async def test() -> None:
        server = await serve("127.0.0.1", 0, TOKEN, Door())
        reader, writer, _ = await raw_challenge(server.port)
        assert await reader.read() == b""
        writer.close()
        await server.close()

    run(test)
    assert "kept silent" in caplog.text


def test_a_silent_controller_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.05)

    async def test() -> None:
        writers = []
        listener = await asyncio.start_server(lambda r, w: writers.append(w), "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(WireError, match="did not answer"):
            await connect(f"127.0.0.1:{port}", TOKEN, agent="a")
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        listener.close()

    run(test)


def test_a_certificate_with_another_fingerprint_is_refused() -> None:
    async def test() -> None:
        server = await serve("127.0.0.1", 0, TOKEN, Door(), make_identity())
        with pytest.raises(WireError, match="someone else answers"):
            await connect(f"127.0.0.1:{server.port}", TOKEN, make_identity().fingerprint, agent="a")
        await server.close()

    run(test)


def test_a_proof_made_for_another_certificate_does_not_count() -> None:
    challenge = auth.make_challenge()
    proof = auth.prove(challenge, TOKEN, "the attacker's certificate", "a")
    assert isinstance(auth.check_proof(challenge, proof, TOKEN, "the controller's"), auth.Rejected)
    assert isinstance(auth.check_proof(challenge, proof, TOKEN, "the attacker's certificate"), auth.Accepted)


def test_connecting_to_a_closed_port_is_a_clear_error() -> None:
    async def test() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # so that nobody else can listen there meanwhile
            with pytest.raises(WireError, match="cannot be reached"):
                await connect(f"127.0.0.1:{taken.getsockname()[1]}", TOKEN, agent="a")
        with pytest.raises(WireError, match="host:port"):
            await connect("nowhere", TOKEN, agent="a")

    run(test)


def test_the_backlog_grows_while_the_peer_does_not_read_and_empties_when_it_does() -> None:
    async def test() -> None:
        reading = asyncio.Event()
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def slow(agent: Channel[AgentMessage]) -> None:
            await reading.wait()
            ended.set_result([await agent.recv() for _ in range(200)][-1])

        server = await serve("127.0.0.1", 0, TOKEN, slow)
        agent = await connect(f"127.0.0.1:{server.port}", TOKEN, agent="a")
        text = "x" * 100_000
        for number in range(200):
            agent.send_nowait(
                RankReported(generation=1, rank=number, reports=(Report(number=1, at=0.0, metrics={"t": text}),))
            )
        assert agent.backlog_bytes > 10_000_000
        reading.set()
        assert (await ended).message.rank == 199
        await agent.drain()
        assert agent.backlog_bytes < 1_000_000
        await agent.close()
        await server.close()

    run(test)


def test_sending_on_a_closed_channel_is_ignored() -> None:
    async def test() -> None:
        server = await serve("127.0.0.1", 0, TOKEN, Door())
        agent = await connect(f"127.0.0.1:{server.port}", TOKEN, agent="a")
        await agent.close()
        await agent.send(Collected(generation=1, sequence=1))
        agent.send_nowait(AnnounceCheckpoint(ticket=Ticket(1, 1), name=None))
        assert await agent.recv() is None
        await agent.close()
        await server.close()

    run(test)


def test_tokens_differ() -> None:
    assert len({auth.make_token() for _ in range(10)}) == 10


@pytest.mark.parametrize("host", ["0.0.0.0", ""])
def test_a_controller_does_not_listen_off_loopback_without_tls(host: str) -> None:
    async def test() -> None:
        with pytest.raises(WireError, match="without TLS"):
            await serve(host, 0, TOKEN, Door())
        server = await serve(host, 0, TOKEN, Door(), make_identity())
        await server.close()

    run(test)


@pytest.mark.parametrize("address", ["192.0.2.1:9", "[2001:db8::1]:9", "0.0.0.0:9", "[::ffff:192.0.2.1]:9"])
def test_an_agent_does_not_dial_off_loopback_without_tls(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        def dialled(*_: Any, **__: Any) -> Any:
            raise AssertionError("nothing may be dialled")

        monkeypatch.setattr(asyncio, "open_connection", dialled)
        with pytest.raises(WireError, match=r"Refusing to connect at .* without TLS"):
            await connect(address, TOKEN, agent="a")

    run(test)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.1", "[::ffff:127.0.0.1]"])
def test_loopback_needs_no_tls(host: str) -> None:
    async def test() -> None:
        server = await serve("127.8.9.1" if host == "127.8.9.1" else "127.0.0.1", 0, TOKEN, Door())
        agent = await connect(f"{host}:{server.port}", TOKEN, agent="a")
        assert await _message(agent) == Ping()
        await agent.close()
        await server.close()

    run(test)


def test_a_slow_handshake_is_cut_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The time limit is for the whole handshake: a byte now and then does not renew it."""
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.2)

    async def test() -> None:
        server = await serve("127.0.0.1", 0, TOKEN, Door())
        reader, writer, challenge = await raw_challenge(server.port)
        proof = encode(auth.prove(challenge, TOKEN, "", "a"))
        end = asyncio.ensure_future(reader.read())
        for at in range(len(proof) - 1):
            writer.write(proof[at : at + 1])
            done, _ = await asyncio.wait({end}, timeout=0.02)
            if done:
                break
        with suppress(ConnectionError):
            assert await end == b""
        writer.close()
        await server.close()

    run(test)
    assert "kept silent" in caplog.text


def test_logged_input_of_strangers_is_escaped(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        server = await serve("127.0.0.1", 0, TOKEN, Door())
        reader, writer, _ = await raw_challenge(server.port)
        writer.write(encode({"type": "\x1b[2JProof"}))
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await server.close()

    run(test)
    assert "\\u001b[2JProof" in caplog.text and "\x1b" not in caplog.text
