"""A plain script for `holdfast launch`, without torch or a line of ours: each worker writes its place to a file.

    python -m tests.faults.programs.plain_script DIRECTORY

It fails once where the file `fail` is there, and ends when `end` is.
"""

import os
import sys
import time
from pathlib import Path

directory = Path(sys.argv[1])
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT")
place = directory / f"place_{os.environ['TEST_HOST']}_{os.environ['LOCAL_RANK']}"
draft = place.with_suffix(".draft")
draft.write_text(" ".join(os.environ[name] for name in names))
draft.rename(place)
while not (directory / "end").exists():
    if os.environ["RANK"] == "0" and (directory / "fail").exists():
        (directory / "fail").unlink()
        sys.exit(7)
    time.sleep(0.02)
