"""`python -m holdfast`: the command line, where the script `holdfast` is not on the PATH."""

from __future__ import annotations

import sys

from holdfast.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
