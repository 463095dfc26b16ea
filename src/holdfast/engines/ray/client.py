"""A caller outside the cluster's network, connected by Ray's client (`ray://`): it finds or starts the actor that has
its driver (`driver_actor`) on the head, and asks it. Every call blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from holdfast.engines.ray.cluster import import_ray
from holdfast.engines.ray.driver_actor import DriverActor
from holdfast.errors import ConfigError, RunError

__all__ = ["ClusterDriver", "connect", "disconnect", "is_client"]

_NAMESPACE = "holdfast"
_HEAD = {"node:__internal_head__": 0.001}
_OURS = ("working_dir", "excludes", "env_vars")
"""What is sent with the job."""
_ENDING_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
_connected_here = False


def is_client() -> bool:
    """Whether this process is connected to a cluster as a client."""
    import ray.util.client

    return bool(ray.util.client.ray.is_connected())


def connect(address: str) -> None:
    """Connect this process to the cluster at `ray://HOST:PORT`, unless it is connected as a client."""
    global _connected_here
    ray = import_ray()
    if is_client():
        return
    if ray.is_initialized():
        raise ConfigError(
            f"This process belongs to a Ray cluster, so it cannot be a client of the one at {address}: leave out "
            "ray.init(), or the address."
        )
    try:
        ray.init(address, logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, TimeoutError) as error:
        raise ConfigError(
            f"No Ray cluster answers at {address}: check that its head runs, with --ray-client-server-port, and that "
            "this machine reaches that port (10001, unless it was given another)."
        ) from error
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConfigError(f"The Ray cluster at {address} refuses this client: {first}.") from error
    _connected_here = True


def disconnect() -> None:
    """End the connection, if `connect` made it."""
    global _connected_here
    if _connected_here:
        import ray

        _connected_here = False
        ray.shutdown()


class ClusterDriver:
    """The driver of one `(storage_path, name)` on the cluster that this process is a client of."""

    def __init__(self, name: str, runtime_env: Mapping[str, Any], words: str) -> None:
        """`name` is the actor's; `words` what the run is called in errors."""
        self._name, self._words = name, words
        self._environment = {key: value for key, value in runtime_env.items() if key not in _OURS} or None
        self._actor: Any = None

    def find(self, fingerprint: str) -> tuple[str, bool]:
        """Find the actor, or start one; gives `DriverActor.state`. One that is just ending is waited for."""
        for pause_s in _ENDING_PAUSES_S:
            try:
                return self._find(fingerprint)
            except RunError as error:
                if not _is_ending(error.__cause__):
                    raise
                time.sleep(pause_s)
        return self._find(fingerprint)

    def _find(self, fingerprint: str) -> tuple[str, bool]:
        self._actor = self._call(
            lambda ray: (
                ray.remote(DriverActor)
                .options(
                    name=self._name,
                    namespace=_NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    max_restarts=0,
                    num_cpus=0,
                    resources=_HEAD,
                    runtime_env=self._environment,
                )
                .remote()
            )
        )
        return self._ask("state", fingerprint)  # type: ignore[no-any-return]

    def start(self, module: str, job: bytes, fingerprint: str, keep_s: float) -> None:
        """`DriverActor.start`."""
        self._ask("start", module, job, fingerprint, keep_s)

    def read(self, position: int) -> tuple[int, list[tuple[int, str]], bool, bytes | None, str]:
        """`DriverActor.read`."""
        return self._ask("read", position)  # type: ignore[no-any-return]

    def taken(self) -> None:
        """`DriverActor.taken`."""
        self._ask("taken")

    def stop(self, number: int) -> None:
        """`DriverActor.stop`."""
        self._ask("stop", number)

    def _ask(self, method: str, *arguments: object) -> Any:
        return self._call(lambda ray: ray.get(getattr(self._actor, method).remote(*arguments)))

    def _call(self, call: Any) -> Any:
        import ray
        from ray import exceptions

        try:
            return call(ray)
        except exceptions.RuntimeEnvSetupError as error:
            last = str(error).strip().splitlines()[-1]
            raise ConfigError(f"{self._words}: its runtime_env could not be set up on the cluster: {last}") from error
        except exceptions.ActorDiedError as error:
            raise RunError(
                f"{self._words}: the actor of its driver on the Ray cluster has died; the same call continues the run."
            ) from error
        except exceptions.RayTaskError as error:
            raise RunError(f"{self._words}: its driver on the Ray cluster failed: {error.cause}") from error
        # Ray's client raises all sorts of things when its cluster is gone.
        except (exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise RunError(
                f"{self._words}: the connection to its Ray cluster was lost; if the cluster lives, the run goes on "
                "there, and the same call comes back to it, or continues it on another cluster."
            ) from error


def _is_ending(error: BaseException | None) -> bool:
    """Whether an actor that was found by its name has ended meanwhile, or its class has been forgotten with its job."""
    from ray import exceptions

    return isinstance(error, exceptions.RayTaskError | exceptions.ActorDiedError)
