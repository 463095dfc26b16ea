"""The zygote and its successor never deadlock, however many modules there are to import."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, socket
from holdfast.zygote.next_zygote import NextZygote, import_until_takeover

ours, theirs = socket.socketpair()
pid = os.fork()
if pid == 0:
    ours.close()
    import_until_takeover(theirs, lambda: None)
theirs.close()
child = NextZygote(pid, ours, [f"missing_{n}" for n in range(2000)])
child.import_modules([f"absent_{n}" for n in range(2000)])
while not child.is_ready:
    child.receive()
    assert not child.spoiled
print(len(child.end()))
"""


def test_thousands_of_modules_are_imported_without_a_deadlock() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=200, check=True)
    assert done.stdout.split() == ["4000"]
