"""One of many writers that commit to the same run at once: waits for the word on stdin, then tells what it
committed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

from holdfast.checkpoint.commit import commit_directory
from holdfast.storage.locate import open_store

__all__ = ["main"]


def main() -> None:
    uri, who, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    store = open_store(uri)
    assert store.exclusive in (True, False)  # probed before the race, so that all start at once
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary)
        (source / "same.bin").write_bytes(b"same in every checkpoint" * 50)
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(rounds):
            (source / "own.txt").write_text(f"writer {who}, round {number}")
            done = commit_directory(store, source, metrics={"who": who, "round": number})
            print(msgspec.json.encode([done.name, done.index]).decode(), flush=True)


if __name__ == "__main__":
    main()
