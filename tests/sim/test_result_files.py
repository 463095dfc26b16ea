"""The result files of simulated runs: whatever died in between, they show the reports that count.

Every driver of these simulations has the real `ResultFiles` beside its fold writer, on the store that lags, fails and
tears. When the files of the last driver say that all is written, result.json must be what the journal says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.sim import driver as drivers
from tests.sim.checkers import reports_that_count
from tests.sim.simulation import Simulation

from holdfast.control.history import open_journal
from holdfast.control.lease import Lease
from holdfast.control.loop import ControllerSetup
from holdfast.core import records as r
from holdfast.core.curve import Change
from holdfast.views.files import results
from holdfast.views.files.results import ResultFiles

_SEEDS = 40
_MUTANT_SEEDS = 200


class _Publisher(drivers._SimulatedPublisher):
    """Shows records to the result files as well."""

    def __init__(self, files: ResultFiles, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._files = files
        self._showing = False

    def close(self) -> None:
        self._task.cancel()
        self.release()

    async def finish(self) -> bool:
        """What the real publisher does when it is closed: the last records, after those that are being shown."""
        while self._showing:
            await asyncio.sleep(0.1)
        for record in self._released:
            self._fold_writer.record(record)
            self._files.record(record)
        return await asyncio.to_thread(self._files.flush, True)

    def _show(self, records: list[r.Record]) -> None:
        self._showing = True
        try:
            super()._show(records)
            for record in records:
                self._files.record(record)
            self._files.flush()
        finally:
            self._showing = False


class _Watch:
    """Gives drivers result files of the first run; remembers those of the last one, and whether all was written."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.all: list[ResultFiles] = []
        self.complete = False
        set_up, run = drivers.Guest._set_up, drivers.WatchedController.run
        watch = self

        def with_files(guest: drivers.Guest, lease: Lease) -> ControllerSetup:
            plan = set_up(guest, lease)
            if guest.run.number > 0:
                return plan
            files = ResultFiles(
                guest.store,
                open_journal(guest.store)[0],
                epoch=lease.epoch,
                lease=lease.id,
                clock=guest.sim.loop.time,
                fenced=lease.is_fenced,
            )
            watch.all.append(files)
            watch.complete = False
            plan.make_publisher = partial(_Publisher, files, guest.process)
            return plan

        async def with_final_flush(controller: drivers.WatchedController) -> Any:
            if not isinstance(controller._publisher, _Publisher):
                return await run(controller)
            files = watch.all[-1]
            status = await run(controller)
            complete = await controller._publisher.finish()
            if files is watch.all[-1]:
                watch.complete = complete
            return status

        patch.setattr(drivers.Guest, "_set_up", with_files)
        patch.setattr(drivers.WatchedController, "run", with_final_flush)
        patch.setattr(results, "_SAVE_ROWS", 1)  # so that a new controller finds something to go on from

    def close(self) -> None:
        for files in self.all:
            for sink in files._sinks or ():
                sink.close()
        self.all.clear()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Watch]:
    watching = _Watch(monkeypatch)
    yield watching
    watching.close()


def _check(seed: int, watch: _Watch) -> bool:
    """Whether the seed showed anything; fails where the files are wrong."""
    simulation = Simulation(seed)
    ending = simulation.run()
    try:
        if ending != "finished" or not watch.complete:
            return False
        lines = simulation.bucket.objects["run/result.json"].splitlines()
        shown = [json.loads(line)["training_iteration"] for line in lines]
        assert shown == [one.iteration for one in reports_that_count(simulation.records())], f"seed {seed}"
        return True
    finally:
        watch.close()


def test_result_files_show_the_reports_that_count(watch: _Watch) -> None:
    assert sum(_check(seed, watch) for seed in range(_SEEDS)) > _SEEDS // 2


def _keep_superseded_rows(patch: pytest.MonkeyPatch) -> None:
    def roll_back(files: ResultFiles, sinks: Any, at: float, change: Change) -> None:
        files._written = change.kept_rows - len(files._waiting)

    patch.setattr(ResultFiles, "_roll_back", roll_back)


def _forget_earlier_controllers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ResultFiles, "_replay", lambda files, sinks: None)


@pytest.mark.parametrize("mutant", [_keep_superseded_rows, _forget_earlier_controllers])
def test_a_mutant_of_the_result_files_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], watch: _Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        for seed in range(_MUTANT_SEEDS):
            _check(seed, watch)
