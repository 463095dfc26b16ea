"""When a process may be forked: as long as it has one thread and no device is in use.

`zygote`, `next_zygote` and `import_trial` ask after each import; where the answer is no, workers are started as fresh
processes (`cold_start`), and the log says why.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.linux.process import thread_names

__all__ = ["one_thread_each", "unsafe_reason"]

_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator, hence pandas and LightGBM too
}


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Numeric libraries read their thread counts when they are imported, and some start that many: none, in here."""
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def unsafe_reason(after: str) -> str | None:
    """Why this process must not be forked, or None; `after` is what was done last."""
    threads = thread_names()
    if len(threads) > 1:
        import threading

        python = sorted(t.name for t in threading.enumerate() if t is not threading.main_thread())
        named = ", ".join(python or sorted(threads)[:5])
        return f"{after} started {len(threads) - 1} thread(s) ({named})"
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return f"{after} initialised CUDA"
    return None
