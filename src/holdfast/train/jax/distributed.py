"""`jax.distributed` around a training function: rank 0 serves the coordinator, every rank joins it.

`JaxTrainer` sends this to the workers as their framework; `worker.bootstrap` calls `setup` and `shutdown`.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from holdfast.storage.local_cache import local_cache_dir
from holdfast.train.rendezvous import find_free_port, wait_for_listener
from holdfast.worker.bootstrap import release_port
from holdfast.worker.job import Assignment
from holdfast.worker.session import current

__all__ = ["JaxDistributed"]

_SHUTDOWN_S = 5.0
"""How long the system may take to go: its peers may be dead, and this process ends anyway."""
_HEARTBEAT_S = 3600
"""Of JAX's own watch over its peers, which ends the process that notices a dead one. The agent is quicker, and says
why."""


@dataclass(frozen=True, slots=True)
class JaxDistributed:
    """A `Framework` (see `holdfast.worker.job`): one JAX system over all workers, with the ranks of the run."""

    use_gpu: bool = False

    def setup(self, assignment: Assignment, master_listen_fd: int | None) -> None:
        if self.use_gpu:
            os.environ.setdefault("JAX_PLATFORMS", "cuda")
        if master_listen_fd is not None:
            release_port(master_listen_fd)
        import jax

        _use_compilation_cache(jax)
        if assignment.world_size == 1:
            return
        host = assignment.master_address
        port = None
        if assignment.rank == 0:
            # Under torchrun, MASTER_PORT is the port of its own store.
            port = assignment.master_port if master_listen_fd is not None else find_free_port(host)
        port = current().broadcast_from_rank_zero(port)
        if assignment.rank != 0:
            wait_for_listener(host, port)
        jax.distributed.initialize(
            f"{host}:{port}",
            num_processes=assignment.world_size,
            process_id=assignment.rank,
            local_device_ids=[assignment.local_rank] if self.use_gpu else None,
            coordinator_bind_address=f"{host}:{port}",
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=_HEARTBEAT_S,
        )

    def shutdown(self) -> None:
        import jax

        if not jax.distributed.is_initialized():
            return
        # Leaving waits for the other ranks, and a dead one never answers.
        thread = threading.Thread(target=_leave, name="holdfast-jax-shutdown", daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_S)


def _use_compilation_cache(jax: Any) -> None:
    """A restarted worker finds what was compiled before. JAX has such a cache, but it is off by default."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(local_cache_dir() / "jax"))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _leave() -> None:
    import jax

    with suppress(RuntimeError):  # a system with dead peers says so; it goes all the same
        jax.distributed.shutdown()
