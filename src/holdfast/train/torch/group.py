"""The process group around a training function: made before it runs, taken down after, in each worker.

Rank 0 serves the rendezvous on a socket that its agent has been listening on since before the fork, so nobody ever
dials a port that is not open yet, and nobody else can take it in between. `bootstrap` calls `setup` and `shutdown`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError
from holdfast.linux.network import interface_of
from holdfast.worker import session as sessions
from holdfast.worker.job import Assignment

__all__ = ["TorchGroup"]

_SHUTDOWN_S = 5.0
"""How long a group may take to go: its peers may be dead, and this process ends anyway."""


@dataclass(frozen=True, slots=True)
class TorchGroup:
    """A `Framework` (see `holdfast.worker.job`): `torch.distributed`'s default group over all workers."""

    backend: str | None
    timeout_s: float
    from_environment: bool = False
    """The processes are torchrun's: they meet where its variables say."""

    def setup(self, assignment: Assignment, master_listen_fd: int | None) -> None:
        import torch
        import torch.distributed as dist

        if os.environ.get("HOLDFAST_USE_GPU") == "1" and torch.cuda.is_available():
            from holdfast.train.torch.devices import get_device

            torch.cuda.set_device(get_device())
        backend = self._backend(torch)
        _check_backend(backend, dist)
        timeout = datetime.timedelta(seconds=self.timeout_s)
        if self.from_environment:
            dist.init_process_group(backend, init_method="env://", timeout=timeout)
            return
        _choose_interface(assignment.address or assignment.master_address)
        dist.init_process_group(
            backend,
            store=_meet(assignment, master_listen_fd, timeout),
            rank=assignment.rank,
            world_size=assignment.world_size,
            timeout=timeout,
        )
        sessions.note(f"The process group is set up: {dist.get_backend()}, world size {assignment.world_size}")

    def shutdown(self) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            return
        # Destroying waits for what is under way, which a dead peer will never answer: the wait is in a thread that
        # this process does not wait for.
        thread = threading.Thread(target=_destroy, name="holdfast-group-shutdown", daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_S)

    def _backend(self, torch: Any) -> str:
        if self.backend is not None:
            return self.backend
        gpu = os.environ.get("HOLDFAST_USE_GPU") == "1" and torch.cuda.is_available()
        return "nccl" if gpu else "gloo"


def _check_backend(backend: str, dist: Any) -> None:
    """Refuse what this node's torch does not have; it may be one for each kind of device, as in cpu:gloo,cuda:nccl."""
    for name in (part.rpartition(":")[2] for part in backend.split(",")):
        if not dist.is_backend_available(name):
            usable = [one for one in dist.Backend.backend_list if one not in ("undefined", "fake")]
            has = ", ".join(filter(dist.is_backend_available, usable))
            raise ConfigError(f"TorchConfig(backend={backend!r}): torch has no backend {name!r} here; it has {has}.")


def _choose_interface(address: str) -> None:
    """Tell gloo and NCCL the interface at which other nodes reach this one: left to themselves, they choose by the
    host's name, or take the first. On loopback, nothing needs to be seen from outside."""
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if name not in (None, "lo"):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # this very one, not all that begin like it


def _meet(assignment: Assignment, master_listen_fd: int | None, timeout: datetime.timedelta) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(
        assignment.master_address,
        assignment.master_port,
        assignment.world_size,
        is_master=assignment.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=master_listen_fd if assignment.rank == 0 else None,
    )


def _destroy() -> None:
    import torch.distributed as dist

    with contextlib.suppress(RuntimeError, ValueError):  # A group with dead peers may say so; it goes all the same.
        dist.destroy_process_group()
