"""Whether a process is alive, dead or unknown from here."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from holdfast.checkpoint.process_identity import ProcessIdentity, describe, is_dead, this_process


def test_the_current_process_is_alive() -> None:
    me = this_process()
    assert is_dead(me) is False
    assert describe(me).endswith(f":{me.pid}")
    assert msgspec.json.decode(msgspec.json.encode(me), type=ProcessIdentity) == me


def test_a_process_asks_once_who_it_is_and_a_forked_one_again() -> None:
    me = this_process()
    assert this_process() is me
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, msgspec.json.encode(this_process()))
        os._exit(0)
    found = msgspec.json.decode(os.read(reader, 4096), type=ProcessIdentity)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert found.pid == child and found != me


def test_an_exited_child_is_gone() -> None:
    program = "import msgspec; from holdfast.checkpoint.process_identity import this_process as me;"
    program += "print(msgspec.json.encode(me()).decode(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        writer = msgspec.json.decode(child.stdout.readline(), type=ProcessIdentity)
        assert writer.pid == child.pid
        assert is_dead(writer) is False
        child.stdin.write(b"\n")
        child.stdin.close()
        # Its output ends when it does; it is a zombie until it is waited for, which is dead enough.
        assert child.stdout.read() == b""
        child.wait()
        assert is_dead(writer) is True


def test_a_reused_pid_is_another_process() -> None:
    me = this_process()
    assert is_dead(msgspec.structs.replace(me, started_ticks=me.started_ticks + 1)) is True


@pytest.mark.parametrize("field", ["host", "boot_id", "pid_namespace"])
def test_processes_of_other_machines_are_unknown(field: str) -> None:
    assert is_dead(msgspec.structs.replace(this_process(), **{field: "other"})) is None
    assert is_dead(msgspec.structs.replace(this_process(), boot_id="")) is None
    assert is_dead(msgspec.structs.replace(this_process(), started_ticks=0)) is None
