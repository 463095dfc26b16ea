"""`holdfast status`, `stop`, `drain`, `scale` and `join`: ask the driver that runs a run.

They find it by the run's lease (`control.client`). `status` and `stop` make sense without one, too, and then tell what
the run's directory knows.
"""

from __future__ import annotations

import time
from typing import Any

import click
import msgspec

from holdfast.cli.named_run import NamedRun, find_named_run
from holdfast.cli.output import json_option, print_json, print_line, print_table
from holdfast.control.client import DriverAddress, ask
from holdfast.control.history import History, read_history
from holdfast.core import records as r
from holdfast.errors import NotFound, WireError
from holdfast.launch.options import parse_range
from holdfast.views.formatting import count_text, metrics_text, ranks_brief, running_time
from holdfast.wire import control_messages as cm

__all__ = ["drain", "join", "scale", "status", "stop"]

_POLL_S = 0.1


@click.command(short_help="Show how a run stands.")
@click.argument("run", metavar="RUN")
@json_option
def status(run: str, as_json: bool) -> None:
    """Show how RUN stands: what its driver says, or, where none runs, how it ended and how to continue.

    RUN is the URI of a run's directory, or its name where it lies in the default storage path; also a tuning
    experiment, or the directory of one of its trials.
    """
    named = find_named_run(run)
    driver = named.find_driver()
    if driver is not None:
        try:
            reply = ask(driver, cm.GetStatus(), cm.ExperimentStatusReply if named.is_experiment else cm.RunStatusReply)
        except WireError as error:
            _print_stored(named, as_json, driver, str(error))
            return
        if as_json:
            print_json({"running": True, **msgspec.to_builtins(reply)})
        elif isinstance(reply, cm.ExperimentStatusReply):
            _print_experiment(reply)
        elif isinstance(reply, cm.RunStatusReply):
            _print_running(reply)
        return
    _print_stored(named, as_json)


@click.command(short_help="Stop a run, as Ctrl+C in its terminal does.")
@click.argument("run", metavar="RUN")
@click.option("--force", is_flag=True, help="Wait neither for workers nor for checkpoints on their way.")
def stop(run: str, force: bool) -> None:
    """Stop RUN, as Ctrl+C in its terminal does, and wait until it has ended.

    Other runs of the same driver go on. The same script continues the run from its newest checkpoint. A trial that is
    stopped has ended, and its experiment goes on with others.
    """
    named = find_named_run(run)
    driver = named.find_driver()
    if driver is None:
        print_line(f"Nothing runs in {named.store.uri}.")
        return
    print_line(ask(driver, cm.StopRun(force=force), cm.Done).text, err=True)
    if named.trial:
        return  # its experiment goes on
    while (now := named.find_driver()) is not None and now.holder.epoch.id == driver.holder.epoch.id:
        time.sleep(_POLL_S)
    _print_stored(named, as_json=False)


@click.command(short_help="Take a driver's runs off a node.")
@click.argument("run", metavar="RUN")
@click.argument("node", metavar="NODE")
@click.option(
    "--deadline", type=click.FloatRange(min=0, max=1e9), metavar="SECONDS", help="The node is gone in so many seconds."
)
def drain(run: str, node: str, deadline: float | None) -> None:
    """Take RUN, and other runs of its driver, off NODE: an agent's name or a host's, as `holdfast status` shows them.

    The node gets no new workers. Those that run there go on from the next checkpoint elsewhere, if other agents have
    room for them, and otherwise stay where they are, or until shortly before --deadline.
    """
    request = cm.DrainNode(node=node, deadline_s=deadline)
    print_line(ask(_running(find_named_run(run)), request, cm.Done).text)


@click.command(short_help="Change how many workers a run may have.")
@click.argument("run", metavar="RUN")
@click.argument("workers", metavar="WORKERS")
def scale(run: str, workers: str) -> None:
    """Change how many workers RUN may have: WORKERS is MIN:MAX, such as 2:6, or one number for both.

    RUN must have been started with ScalingConfig(num_workers=(min, max)). It grows when there is room, and shrinks,
    at a checkpoint, so that no step is lost. The bounds hold when its script is started again, until that asks for
    another number of workers.
    """
    workers_min, workers_max = parse_range(workers, "WORKERS")
    request = cm.SetWorkers(workers_min=workers_min, workers_max=workers_max)
    print_line(ask(_running(find_named_run(run)), request, cm.Done).text)


@click.command(short_help="Print what an agent needs in order to join a run.")
@click.argument("run", metavar="RUN")
def join(run: str) -> None:
    """Print RUN's join string, for `holdfast agent --join` on another machine."""
    print_line(ask(_running(find_named_run(run)), cm.GetJoinString(), cm.Done).text)


def _running(named: NamedRun) -> DriverAddress:
    driver = named.find_driver()
    if driver is None:
        raise NotFound(f"Nothing runs in {named.store.uri}: start its script first.")
    return driver


def _print_running(reply: cm.RunStatusReply) -> None:
    since = running_time(time.time() - reply.started_at)
    print_line(f"Run {reply.name}: {reply.phase}, in process {reply.pid} on {reply.host} for {since}")
    workers = str(reply.workers_max)
    if reply.workers_min != reply.workers_max:
        workers = f"{reply.workers_min} to {reply.workers_max}"
    rows = [("workers", f"{reply.world_size} of {workers}")]
    if reply.waiting_for:
        rows.append(("waiting for", reply.waiting_for))
    rows.append(("iteration", f"{reply.iteration}  {metrics_text(reply.metrics)}".rstrip()))
    newest = f"{reply.checkpoint} (iteration {reply.checkpoint_iteration})" if reply.checkpoint else "none yet"
    rows.append(("checkpoint", newest))
    rows.append(("failures", f"{reply.failures} of {_budget(reply.max_failures)}"))
    if reply.preemptions or reply.max_preemption_failures >= 0:
        rows.append(("preemptions", f"{reply.preemptions} of {_budget(reply.max_preemption_failures)}"))
    rows.append(("directory", reply.uri))
    for name, value in rows:
        print_line(f"  {name:<12}{value}")
    agents = [[one.agent, one.host, _phase(one), ranks_brief(one.ranks) if one.ranks else ""] for one in reply.agents]
    if agents:
        print_line()
        print_table(["AGENT", "HOST", "PHASE", "WORKERS"], agents)


def _budget(most: int) -> str:
    return "any number" if most < 0 else str(most)


def _phase(agent: cm.AgentStatus) -> str:
    notes = ["spare"] if agent.spare else []
    notes += [agent.why] if agent.why else []
    if agent.left_s is not None:
        notes.append(f"{agent.left_s:.0f} s left")
    return f"{agent.phase} ({', '.join(notes)})" if notes else str(agent.phase)


def _print_experiment(reply: cm.ExperimentStatusReply) -> None:
    since = f", in process {reply.pid} on {reply.host} for {running_time(time.time() - reply.started_at)}"
    print_line(f"Experiment {reply.name}: {_state_of(reply)}{since if reply.pid else ''}")
    of = "" if reply.total_trials is None else f" of {reply.total_trials}"
    counts = ", ".join(f"{count} {status}" for status, count in sorted(reply.counts.items()))
    rows = [("trials", f"{sum(reply.counts.values())}{of}  {counts}".rstrip())]
    if reply.best is not None:
        rows.append(("best", f"{reply.best.directory}  {metrics_text(reply.best.metrics)}".rstrip()))
    rows.append(("directory", reply.uri))
    for name, value in rows:
        print_line(f"  {name:<12}{value}")
    if reply.live:
        print_line()
        table = [[one.directory, one.status, str(one.iteration), metrics_text(one.metrics)] for one in reply.live]
        print_table(["TRIAL", "STATUS", "ITERATION", "METRICS"], table)


def _state_of(reply: cm.ExperimentStatusReply) -> str:
    if reply.ended:
        return f"ending ({reply.ended})" if reply.pid else f"ended ({reply.ended})"
    if reply.pid:
        return "running"
    return "not ended" if reply.live else "ended"


def _print_stored(named: NamedRun, as_json: bool, driver: DriverAddress | None = None, why: str = "") -> None:
    """What the run's directory knows; `why` its driver, which may still run, did not answer."""
    if named.is_experiment or named.experiment is not None:
        _print_stored_experiment(named, as_json, driver, why)
        return
    store = named.store
    history = read_history(store)
    newest = history.durable.resume_point()
    if as_json:
        shape: dict[str, Any] = {
            "running": None if driver else False,
            "uri": store.uri,
            "outcome": _outcome(history),
            "iteration": history.durable.iteration,
            "metrics": history.durable.metrics or {},
            "checkpoint": newest.name if newest else "",
            "checkpoint_iteration": newest.iteration if newest else 0,
        }
        print_json(shape | ({"error": why} if why else {}))
        return
    if why:
        print_line(f"warning: {why}", err=True)
    done = f"after {count_text(history.durable.iteration, 'iteration')}"
    print_line(f"Run {store.uri}: {_outcome(history)} {done}.")
    if newest is not None:
        print_line(f"The newest checkpoint is {newest.name} (iteration {newest.iteration}).")
    if driver is None and not isinstance(history.durable.outcome, r.RunFinished):
        source = f"from {newest.name}" if newest else "from the beginning"
        print_line(f"To continue {source}, run the same script again.")


def _print_stored_experiment(named: NamedRun, as_json: bool, driver: DriverAddress | None, why: str) -> None:
    """Of an experiment, or of a trial, whose records its experiment has."""
    from holdfast.tune.run_experiment import read_status, read_trial_status

    reply: cm.ExperimentStatusReply | cm.TrialStatus
    if named.experiment is not None:
        reply = read_trial_status(named.experiment, named.trial)
    else:
        reply = read_status(named.store)
    if as_json:
        shape = {"running": None if driver else False, **msgspec.to_builtins(reply)}
        print_json(shape | ({"error": why} if why else {}))
        return
    if why and not (driver is not None and named.trial):
        print_line(f"warning: {why}", err=True)
    if isinstance(reply, cm.TrialStatus):
        done = f"after {count_text(reply.iteration, 'iteration')}"
        print_line(f"Trial {reply.directory}: {reply.status} {done}  {metrics_text(reply.metrics)}".rstrip())
        return
    _print_experiment(reply)
    if driver is None and reply.live:
        print_line("To continue, run the same script again.")


def _outcome(history: History) -> str:
    match history.durable.outcome:
        case r.RunFinished():
            return "finished"
        case r.RunFailed(error=error):
            return f"failed ({error})"
        case r.RunInterrupted(why=why):
            return f"stopped ({why})"
        case _:
            return "not ended" if history.durable.epoch else "not started"
