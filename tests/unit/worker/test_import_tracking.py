"""Only the worker itself tells what it has imported."""

from __future__ import annotations

import os
import socket
import sys
import types

from tests.unit.worker.fake_agent import make_assignment

from holdfast.worker.import_tracking import ImportTrackingSession


def test_a_forked_process_that_calls_report_sends_nothing_on_the_workers_connection() -> None:
    agent, connection = socket.socketpair()
    session = ImportTrackingSession(next(reversed(sys.modules)), connection, make_assignment())
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            module = types.ModuleType("only_in_the_child")
            module.__spec__ = type(os.__spec__)("only_in_the_child", None, origin="/nowhere.py")
            sys.modules["only_in_the_child"] = module
            session.report({})
        except RuntimeError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    agent.setblocking(False)
    try:
        sent = agent.recv(100)
    except BlockingIOError:
        sent = b""
    assert sent == b""
    session.close()
    agent.close()
    connection.close()
