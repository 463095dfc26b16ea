"""LightGBM's network parameters: every worker finds a free port, and learns those of the others.

`LightGBMTrainer` sends `LightGBMNetwork` to the workers as their framework. LightGBM itself binds the ports, when
`lightgbm.train` is called with the parameters.
"""

from __future__ import annotations

import warnings
from typing import Any

from holdfast.train.rendezvous import exchange_addresses, find_free_port
from holdfast.worker.bootstrap import release_port
from holdfast.worker.job import Assignment

__all__ = ["LightGBMNetwork", "get_network_params"]

_parameters: dict[str, Any] | None = None
"""Of this process, while it is a worker of a `LightGBMTrainer`."""


class LightGBMNetwork:
    """A `Framework` (see `holdfast.worker.job`)."""

    def setup(self, assignment: Assignment, master_listen_fd: int | None) -> None:
        global _parameters
        if assignment.world_size == 1:
            if master_listen_fd is not None:
                release_port(master_listen_fd)
            _parameters = {}
            return
        port = find_free_port("127.0.0.1" if assignment.master_address.startswith("127.") else "")
        machines = exchange_addresses(assignment, master_listen_fd, port)
        _parameters = {"num_machines": len(machines), "local_listen_port": port, "machines": ",".join(machines)}

    def shutdown(self) -> None:
        global _parameters
        _parameters = None


def get_network_params() -> dict[str, Any]:
    """The parameters for `lightgbm.train` that make the workers of a `LightGBMTrainer` train one model; none with one
    worker."""
    if _parameters is None:
        warnings.warn(
            "get_network_params() gives nothing here: call it in the training function of a LightGBMTrainer.",
            stacklevel=2,
        )
    return dict(_parameters or {})
