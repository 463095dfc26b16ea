"""What agents offer and workers take: CPUs, GPUs, memory and custom resources, by the names of `ScalingConfig`.

Amounts are counted in ten-thousandths, as Ray does, so that ten workers with a tenth of a GPU each fill one exactly.
A GPU is a device with an id: a worker takes several whole ones, or a fraction of a single one. Everything else is only
an amount. `core.admission` decides who takes what.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = ["GPU", "FreeResources", "Offer", "Taken", "find_problem", "to_units"]

GPU = "GPU"
_UNITS = 10_000
"""Of one CPU, GPU, byte or piece."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent has. How much of what is not named here there is does not matter to it: it has none."""

    resources: dict[str, float] = {}
    """CPU, memory (in bytes) and custom resources."""
    gpus: tuple[str, ...] = ()
    """The ids of its GPUs, as CUDA_VISIBLE_DEVICES names them."""
    slots: int | None = None
    """How many workers it holds at most, whatever they take."""
    torch: str | None = None
    """The version of torch (`torch_version.has_torch`)."""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker takes of one agent, in units."""

    amounts: dict[str, int] = {}
    gpus: tuple[str, ...] = ()
    """The devices that the worker may see."""
    gpu_units: int = 0
    """Of each of them."""
    slots: int = 1


def to_units(amount: float) -> int:
    return round(amount * _UNITS)


def find_problem(resources: Mapping[str, float]) -> str | None:
    """Why no worker can be given this, if none can: a sentence's end for a person."""
    for name, amount in resources.items():
        if amount and not to_units(amount):
            return f"{name!r}: {amount:g} is less than {1 / _UNITS:g}, the smallest share that is counted"
    gpus = resources.get(GPU, 0)
    if gpus > 1 and gpus != int(gpus):
        return f"{GPU!r}: {gpus:g} is neither a whole number nor a part of one GPU"
    return None


class FreeResources:
    """What is left of one agent's offer."""

    def __init__(self, offer: Offer) -> None:
        self._amounts = {name: to_units(amount) for name, amount in offer.resources.items()}
        self._gpus = dict.fromkeys(offer.gpus, _UNITS)
        """Units that are left of each device."""
        self._slots = offer.slots
        self.torch = offer.torch

    def copy(self) -> FreeResources:
        made = FreeResources(Offer(torch=self.torch))
        made._amounts, made._gpus, made._slots = dict(self._amounts), dict(self._gpus), self._slots
        return made

    def take(self, wanted: Mapping[str, float], slots: int = 1) -> Taken | None:
        """Take what one worker wants; None, and nothing is taken, if there is not enough."""
        amounts = {name: to_units(amount) for name, amount in wanted.items() if amount and name != GPU}
        gpus, share = self._choose_gpus(to_units(wanted.get(GPU, 0)))
        if gpus is None or (self._slots is not None and slots > self._slots):
            return None
        if any(units > self._amounts.get(name, 0) for name, units in amounts.items()):
            return None
        taken = Taken(amounts=amounts, gpus=gpus, gpu_units=share, slots=slots)
        self._add(taken, -1)
        return taken

    def count(self, wanted: Mapping[str, float], slots: int, most: int) -> int:
        """How many workers that want this could take it, one after the other; at most `most`."""
        for name, amount in wanted.items():
            if (units := to_units(amount)) and name != GPU:
                most = min(most, self._amounts.get(name, 0) // units)
        if slots and self._slots is not None:
            most = min(most, self._slots // slots)
        if units := to_units(wanted.get(GPU, 0)):
            most = min(most, self._count_gpu_workers(units))
        return max(0, most)

    def give_back(self, taken: Taken) -> None:
        self._add(taken, 1)

    def block(self, names: frozenset[str]) -> None:
        """Leave nothing of these resources, nor a slot."""
        for name in names & self._amounts.keys():
            self._amounts[name] = 0
        if GPU in names:
            self._gpus.clear()
        if self._slots is not None:
            self._slots = 0

    def _add(self, taken: Taken, sign: int) -> None:
        for name, units in taken.amounts.items():
            self._amounts[name] += sign * units
        for gpu in taken.gpus:
            self._gpus[gpu] += sign * taken.gpu_units
        if self._slots is not None:
            self._slots += sign * taken.slots

    def _count_gpu_workers(self, units: int) -> int:
        if units < _UNITS:
            return sum(left // units for left in self._gpus.values())
        return sum(left == _UNITS for left in self._gpus.values()) // (units // _UNITS)

    def _choose_gpus(self, units: int) -> tuple[tuple[str, ...] | None, int]:
        """Devices for so much, and how much of each is taken; None if there are none.

        A fraction goes where the least is left that is enough, so that whole devices stay whole."""
        if units == 0:
            return (), 0
        if units < _UNITS:
            fitting = [(left, gpu) for gpu, left in self._gpus.items() if left >= units]
            best = min(fitting, default=None, key=lambda one: one[0])
            return (None if best is None else (best[1],)), units
        whole = [gpu for gpu, left in self._gpus.items() if left == _UNITS]
        count = units // _UNITS
        return (tuple(whole[:count]) if len(whole) >= count else None), _UNITS
