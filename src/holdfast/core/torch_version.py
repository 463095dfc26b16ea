"""Whether an agent has the torch that the workers of a run need.

Processes that form a torch process group need the same minor version of torch, whose protocols are its own. Another
patch or build (CPU, CUDA) does as well.
"""

from __future__ import annotations

__all__ = ["find_torch_mismatch", "has_torch"]


def has_torch(offered: str | None, wanted: str) -> bool:
    """Whether workers that need torch of the version `wanted` ("": they need none) can run where `offered` is installed
    ("": none is, None: nobody looked, since it is the installation of the driver)."""
    return not wanted or offered is None or _minor(offered) == _minor(wanted)


def find_torch_mismatch(agent: str, offered: str | None, wanted: str) -> str | None:
    """Why an agent gets no workers of such a run, as a sentence for a person; None if it may."""
    if has_torch(offered, wanted):
        return None
    if not offered:
        return f"Agent {agent} gets no workers of this run, which needs torch: install torch {_minor(wanted)} there."
    return (
        f"Agent {agent} gets no workers of this run: it has torch {offered} and the controller torch {wanted}, which "
        "cannot be in one process group; install the same minor version on both."
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
