"""The channel over real sockets: authenticated peers talk; others lose their connection and disturb nobody."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from holdfast.core.checkpoint_types import Report
from holdfast.core.commands import AnnounceCheckpoint
from holdfast.core.events import RankReported, Ticket, WorkersStopped
from holdfast.errors import ConfigError, WireError
from holdfast.wire import auth, channel
from holdfast.wire.channel import Channel, connect, serve
from holdfast.wire.envelope import Envelope, Stamp
from holdfast.wire.frames import HEADER_BYTES, Splitter, encode
from holdfast.wire.hello import Hello
from holdfast.wire.join_string import is_loopback
from holdfast.wire.messages import (
    PROTOCOL,
    AgentMessage,
    Collected,
    ControllerMessage,
    LogLine,
    Logs,
    Ping,
    Pong,
    Shutdown,
)
from holdfast.wire.tls import client_context, make_identity, server_context

SECRET = "correct horse"


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def off_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends take 127.0.0.1 for an address of another machine."""
    monkeypatch.setattr(channel, "is_loopback", lambda address: False)


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
def test_messages_go_both_ways_and_close_ends_the_channel(with_tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if with_tls:
        off_loopback(monkeypatch)

    async def test() -> None:
        door = Door()
        server = await serve("127.0.0.1", 0, SECRET, door)
        agent = await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="a"))
        assert await _message(agent) == Ping()
        for generation in range(1000):
            await agent.send(WorkersStopped(generation=generation, agent="a", master_port=1))
        for generation in range(1000):
            assert await door.got.get() == WorkersStopped(generation=generation, agent="a", master_port=1)
        await agent.close()
        assert await door.got.get() is None
        await server.close()

    run(test)


@pytest.mark.parametrize("with_tls", [False, True])
def test_large_messages_go_both_ways_at_the_same_time(with_tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if with_tls:
        off_loopback(monkeypatch)

    async def test() -> None:
        door = Door()
        answer = Collected(generation=1, sequence=1, data="y" * 5_000_000)

        async def on_agent(channel: Channel[AgentMessage]) -> None:
            channel.send_nowait(answer)
            await door(channel)

        server = await serve("127.0.0.1", 0, SECRET, on_agent)
        agent = await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="a"))
        large = Logs(generation=1, lines=[LogLine(0, "stdout", "x" * 5_000_000)])
        agent.send_nowait(large)
        assert await _message(agent) == answer
        assert await door.got.get() == large
        await agent.close()
        await server.close()

    run(test)


def test_large_messages_pass_and_a_limit_closes(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        door = Door()
        server = await serve("127.0.0.1", 0, SECRET, door, limit_bytes=3_000_000)
        agent = await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="a"))
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


def test_a_message_of_another_agent_closes_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        door = Door()
        server = await serve("127.0.0.1", 0, SECRET, door)
        agent = await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="a"))
        assert await _message(agent) == Ping()
        monkeypatch.setattr(Stamp, "wrap", lambda _, message, run: Envelope(run, "b", 0, 0, message))
        await agent.send(Pong())
        assert await door.got.get() is None
        assert await agent.recv() is None
        await agent.close()
        await server.close()

    run(test)
    why = "a message of agent 'b' on the connection of 'a'"
    assert [record.message for record in caplog.records if why in record.message]


def test_a_wrong_secret_is_refused_in_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        server = await serve("127.0.0.1", 0, SECRET, Door())
        with pytest.raises(WireError, match="run secret is not the controller's"):
            await connect(f"127.0.0.1:{server.port}", "wrong", Hello(agent="a"))
        await server.close()

    run(test)
    assert len(caplog.records) == 1


def test_another_protocol_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        server = await serve("127.0.0.1", 0, SECRET, Door())
        honest = auth.prove
        monkeypatch.setattr(auth, "prove", lambda *a: msgspec.structs.replace(honest(*a), protocol=99))
        with pytest.raises(WireError, match=f"protocol {PROTOCOL} and the client protocol 99"):
            await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="a"))
        await server.close()

    run(test)


def test_a_controller_without_the_secret_is_rejected() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(auth.make_challenge()))
        await reader.readexactly(HEADER_BYTES)
        writer.write(encode(auth.Accepted(mac=b"x" * 32)))
        await writer.drain()
        writer.close()

    async def test() -> None:
        listener = await asyncio.start_server(impostor, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(WireError, match="does not know the run secret"):
            await connect(f"127.0.0.1:{port}", SECRET, Hello(agent="a"))
        listener.close()

    run(test)


def test_a_replayed_proof_is_refused() -> None:
    async def test() -> None:
        server = await serve("127.0.0.1", 0, SECRET, Door())
        _, first, challenge = await raw_challenge(server.port)
        recorded = encode(auth.prove(challenge, SECRET, "", Hello(agent="a")))
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
        server = await serve("127.0.0.1", 0, SECRET, door)
        agent = await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="a"))
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
        server = await serve("127.0.0.1", 0, SECRET, door)
        agent = await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="a"))
        await agent.send(Shutdown())
        assert await door.got.get() is None
        await agent.close()
        await server.close()

    run(test)


def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.05)

    async def test() -> None:
        server = await serve("127.0.0.1", 0, SECRET, Door())
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
            await connect(f"127.0.0.1:{port}", SECRET, Hello(agent="a"))
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        listener.close()

    run(test)


def test_a_man_in_the_middle_with_a_certificate_of_his_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """He passes on every byte that he decrypts; the proofs are over the certificates that each side sees."""
    off_loopback(monkeypatch)

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, ssl.SSLError):
            while data := await reader.read(4096):
                writer.write(data)
        writer.close()

    async def test() -> None:
        server = await serve("127.0.0.1", 0, SECRET, Door())

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=client_context())
            await asyncio.gather(pipe(reader, far_writer), pipe(far_reader, writer))

        context = server_context(make_identity())
        listener = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(WireError, match="run secret is not the controller's"):
            await connect(f"127.0.0.1:{port}", SECRET, Hello(agent="a"))
        listener.close()
        await server.close()

    run(test)


def test_a_proof_made_for_another_certificate_does_not_count() -> None:
    challenge = auth.make_challenge()
    proof = auth.prove(challenge, SECRET, "the attacker's certificate", Hello(agent="a"))
    assert isinstance(auth.check_proof(challenge, proof, SECRET, "the controller's"), auth.Rejected)
    assert isinstance(auth.check_proof(challenge, proof, SECRET, "the attacker's certificate"), auth.Accepted)


def test_connecting_to_a_closed_port_is_a_clear_error() -> None:
    async def test() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # so that nobody else can listen there meanwhile
            with pytest.raises(WireError, match="cannot be reached"):
                await connect(f"127.0.0.1:{taken.getsockname()[1]}", SECRET, Hello(agent="a"))
        with pytest.raises(ConfigError, match="HOST:PORT"):
            await connect("nowhere", SECRET, Hello(agent="a"))

    run(test)


def test_the_backlog_grows_while_the_peer_does_not_read_and_empties_when_it_does() -> None:
    async def test() -> None:
        reading = asyncio.Event()
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def slow(agent: Channel[AgentMessage]) -> None:
            await reading.wait()
            ended.set_result([await agent.recv() for _ in range(200)][-1])

        server = await serve("127.0.0.1", 0, SECRET, slow)
        agent = await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="a"))
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
        server = await serve("127.0.0.1", 0, SECRET, Door())
        agent = await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="a"))
        await agent.close()
        await agent.send(Collected(generation=1, sequence=1))
        agent.send_nowait(AnnounceCheckpoint(ticket=Ticket(1, 1), name=None))
        assert await agent.recv() is None
        await agent.close()
        await server.close()

    run(test)


def test_bytes_that_are_not_tls_are_refused_off_loopback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is sent in the clear, neither by the controller nor by the agent."""
    off_loopback(monkeypatch)

    async def test() -> None:
        server = await serve("127.0.0.1", 0, SECRET, Door())
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionError):
            assert b"nonce" not in await reader.read()
        writer.close()
        await server.close()
        heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.set_result(await reader.read(3))
            writer.close()

        listener = await asyncio.start_server(listen, "127.0.0.1", 0)
        with pytest.raises(WireError, match="hung up"):
            await connect(f"127.0.0.1:{listener.sockets[0].getsockname()[1]}", SECRET, Hello(agent="a"))
        assert (await heard)[:2] == b"\x16\x03", "a TLS record"
        listener.close()

    run(test)
    assert "does not speak TLS" in caplog.text


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.1", False),
        ("::ffff:192.0.2.1", False),
        ("fe80::1%eth0", False),
    ],
)
def test_loopback_addresses_are_known(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_another_minor_version_of_python_is_refused_in_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        door = Door()
        server = await serve("127.0.0.1", 0, SECRET, door)
        agent = await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="a"))
        with pytest.raises(WireError, match=r"Agent b has Python 2\.7 and the controller Python 3"):
            await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="b", python="2.7"))
        await agent.send(Pong())
        assert await door.got.get() == Pong()
        await agent.close()
        await server.close()

    run(test)
    assert len(caplog.records) == 1


def test_an_agent_that_the_hub_does_not_want_is_told_why() -> None:
    async def test() -> None:
        check = {"b": "The name b is taken."}
        server = await serve("127.0.0.1", 0, SECRET, Door(), check_hello=lambda hello, _: check.get(hello.agent))
        with pytest.raises(WireError, match=r"The name b is taken\."):
            await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="b"))
        agent = await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="a"))
        await agent.close()
        await server.close()

    run(test)


def test_silent_connections_are_bounded_and_keep_nobody_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel, "_HANDSHAKES_MAX", 8)

    async def test() -> None:
        server = await serve("127.0.0.1", 0, SECRET, Door())
        strangers = [await raw_challenge(server.port) for _ in range(20)]
        for reader, _, _ in strangers[:12]:
            assert await reader.read() == b"", "the oldest are closed"
        agent = await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="a"))
        assert await _message(agent) == Ping()
        assert len(server._handshakes) == 7
        for _, writer, _ in strangers:
            writer.close()
        await agent.close()
        await server.close()

    run(test)
    assert len(caplog.records) == 1 and "Too many connections" in caplog.text


@pytest.mark.parametrize("tls", [False, True])
def test_hundreds_of_agents_that_dial_at_once_are_not_taken_for_strangers(
    tls: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if tls:
        off_loopback(monkeypatch)

    async def test() -> None:
        server = await serve("127.0.0.1", 0, SECRET, Door())
        dialing = [connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent=f"a{n}")) for n in range(240)]
        agents = await asyncio.gather(*dialing)
        for agent in agents:
            agent.abort()
        await server.close()

    run(test)
    assert not caplog.records


def test_strangers_may_take_a_quarter_of_the_files_that_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for soft in (400, 1_000_000, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda which, soft=soft: (soft, soft))
        found.append(channel.Server(SECRET, Door())._handshakes_max)
    assert found == [100, 512, 512]


def test_connections_that_are_closed_before_tls_has_begun_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    off_loopback(monkeypatch)
    monkeypatch.setattr(channel, "_HANDSHAKES_MAX", 1)

    async def test() -> None:
        server = await serve("127.0.0.1", 0, SECRET, Door())
        strangers = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
        for reader, writer in strangers[:-1]:
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        agent = await connect(f"127.0.0.1:{server.port}", SECRET, Hello(agent="a"))
        assert await _message(agent) == Ping()
        await agent.close()
        strangers[-1][1].close()
        await server.close()

    run(test)
    assert len(caplog.records) == 1 and "Too many connections" in caplog.text


def test_trouble_with_one_host_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        server = await serve("127.0.0.1", 0, SECRET, Door())
        for _ in range(5):
            reader, writer, _ = await raw_challenge(server.port)
            writer.write(b"\0\0\0\x05hello")
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        with pytest.raises(WireError):
            await connect(f"127.0.0.1:{server.port}", "wrong", Hello(agent="a"))
        await server.close()

    run(test)
    assert len(caplog.records) == 2, "the garbage, and the wrong secret"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.1", "[::ffff:127.0.0.1]"])
def test_no_tls_is_used_on_loopback(host: str) -> None:
    async def test() -> None:
        server = await serve("127.8.9.1" if host == "127.8.9.1" else "127.0.0.1", 0, SECRET, Door())
        agent = await connect(f"{host}:{server.port}", SECRET, Hello(agent="a"))
        assert await _message(agent) == Ping()
        await agent.close()
        await server.close()

    run(test)


def test_a_slow_handshake_is_cut_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The time limit is for the whole handshake: a byte now and then does not renew it."""
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.2)

    async def test() -> None:
        server = await serve("127.0.0.1", 0, SECRET, Door())
        reader, writer, challenge = await raw_challenge(server.port)
        proof = encode(auth.prove(challenge, SECRET, "", Hello(agent="a")))
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
        server = await serve("127.0.0.1", 0, SECRET, Door())
        reader, writer, _ = await raw_challenge(server.port)
        writer.write(encode({"type": "\x1b[2JProof"}))
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await server.close()

    run(test)
    assert "\\u001b[2JProof" in caplog.text and "\x1b" not in caplog.text
