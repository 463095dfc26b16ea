"""What one seed asks for: the settings of its runs, their workload, and the faults that will strike them and when."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
from tests.sim.data import DataSet

from holdfast.core.checkpoint_types import ValidationTask
from holdfast.core.retention import RetentionRule
from holdfast.core.spec import RunSpec

__all__ = ["Fault", "Scenario", "draw", "gain"]

FAULTS = {
    "kill_worker": 5,
    "kill_node": 3,
    "cut_link": 2,
    "kill_driver": 3,
    "kill_machine": 1,
    "take_over": 2,
    "hang_worker": 2,
    "stop": 1,
    "force_stop": 1,
    "outage": 2,
    "pause_driver": 3,
    "overtake": 2,
}
_LINK_FAULTS = ["blink", "blink", "blink", "cut_link", "slow_node"]
"""What strikes agents that come back: their connection breaks for a moment, or for long, or they stand still."""
MOMENTS = (
    "leased",
    "started",
    "part",
    "reserved",
    "uploaded",
    "created",
    "flushed",
    "lost",
    "settled",
    "unlinked",
    "request",
    "write",
    "surveyed",
    "positioned",
)
"""When it hurts most: a fault may wait for the n-th of these instead of a time. "request" is any request of a driver's
to storage, "write" one that writes; it has "surveyed" the checkpoints right before it reserves one, and looks at the
journal's end ("positioned") right before it settles its floor."""
_MEMBERSHIP = 0.2
"""The share of seeds in which agents are drained, and runs grow and shrink."""
_SCALED = 0.1
"""The share of seeds in which users change the bounds of runs, and runs keep spare agents."""
_SHARED = 0.16
"""The share of seeds with several runs."""
_RECONNECTING = 0.25
"""The share of seeds with agents that come back."""
_ANNOUNCED = 0.08
"""The share of seeds whose nodes are taken away with notice, late or in time, and nothing else happens."""
_STOPPED = 0.06
"""The share of seeds in which users press Ctrl+C, and nothing but the loss of a node happens."""
_BAD_HOST = 0.05
"""The share of seeds with a host on which all workers die, and others that have room."""
_DATA = 0.2
"""The share of seeds whose runs have elastic loaders."""
_VALIDATED = 0.15
"""The share of seeds whose runs have checkpoints validated."""
_STREAMED = 0.15
"""The share of seeds whose nodes do not see the storage, and read each other's memory."""
_WEIGHTS = list(FAULTS.values())
_NAMES = list(FAULTS)


def gain(iteration: int, run: int = 0) -> int:
    """What one training step adds to the sum: any function of the iteration and the run's number alone."""
    return (iteration + 1000 * run) * 2_654_435_761 % 1_000_003


@dataclass(frozen=True, slots=True)
class Fault:
    """Something bad, at some time, or at the `count`-th `moment` from then on."""

    at: float
    kind: str
    moment: str = ""
    count: int = 1


@dataclass(slots=True)
class Scenario:
    """One seed's run, or the first of its runs."""

    spec: RunSpec
    iterations: int
    checkpoint_every: int
    checkpoint_ranks: str
    """Who gives parts: first, all or last."""
    slots_per_node: int
    lockstep: bool
    """Ranks wait for each other after each iteration, as with a collective."""
    batch: int
    step_s: float
    message_s: float
    storage_s: float
    """How long a request to storage takes; a commit makes about twenty."""
    flush_s: float
    quiet_at: float
    """No fault strikes after this."""
    faults: list[Fault] = field(default_factory=list)
    poison: dict[int, int] = field(default_factory=dict)
    """Iteration to how often it raises before it passes."""
    storage_trouble: float = 0.0
    storage_fatal: float = 0.0
    refusals: float = 0.0
    repeats: float = 0.0
    exclusive: bool = True
    """Whether the storage refuses to create what is there."""
    tears: bool = False
    """Whether a write that is interrupted may leave half of it."""
    retries: bool = True
    """Whether drivers try each request several times, as they do with object stores."""
    one_machine: bool = True
    """Whether a driver can see whether another one's process is alive."""
    retries_of_failed: int = 2
    beat_s: float = 3.0
    """How often drivers look at their lease."""
    outage_s: float = 5.0
    patience_s: float = 8.0
    """How long storage may fail before the run does."""
    pins: list[float] = field(default_factory=list)
    """When a user pins a checkpoint, or lifts a pin."""
    names_in_turn: bool = False
    """Checkpoints are called by two names in turn; retention has removed the one before the last by then."""

    others: list[Scenario] = field(default_factory=list)
    """Further runs of the same drivers, on the same agents. Their specification and workload count; all else, faults
    included, is as this one says."""
    agent_slots: int = 0
    """How many workers an agent holds; 0 means any number."""
    runs_take_turns: bool = False
    """There are agents for one run at a time only: the others wait."""
    hosts: int = 0
    """Agents run on so many hosts; 0: each on one of its own, or all on the driver's."""
    only_announced: bool = False
    """Nothing happens to nodes but what was announced."""
    agents_come_back: bool = False
    """Agents connect again when their connection breaks, and outlive their driver."""

    grace_s: float = 0.0
    """How long a stop waits for a last checkpoint."""

    asks: bool = False
    """The function calls `should_checkpoint` before each report, and reports a checkpoint whenever that says so."""

    data: DataSet | None = None
    """What it trains on, with an elastic loader."""

    validates: bool = False
    """Some reports ask that their checkpoint be validated."""

    streams: bool = False
    """Most nodes do not see the storage: what they restore may come from another node's memory."""

    whole_parts: bool = False
    """Each rank's part is all that a checkpoint needs, and its report says so."""

    waits_for_commits: bool = False
    """A report that carries a checkpoint returns when that is committed or given up."""

    @property
    def never_loses_planned(self) -> bool:
        """Whether a planned change loses no step, whatever the ranks do: rank 0 gives a part, or all of them wait."""
        return self.asks or self.lockstep or self.checkpoint_ranks != "last"

    def validation(self, iteration: int) -> ValidationTask | None:
        """What the report of this iteration asks for: the same of all ranks and all attempts."""
        return ValidationTask(fn_kwargs={}) if self.validates and gain(iteration) % 3 else None

    def dir_name(self, iteration: int) -> str | None:
        """The name that the user gives the checkpoint of this iteration."""
        return f"turn_{iteration // self.checkpoint_every % 2}" if self.names_in_turn else None

    def gives_part(self, rank: int, world_size: int) -> bool:
        if self.checkpoint_ranks == "all":
            return True
        return rank == (0 if self.checkpoint_ranks == "first" else world_size - 1)


def draw(seed: int) -> Scenario:
    """The same seed, the same scenario."""
    scenario = _draw_run(str(seed))
    chance = random.Random(f"runs {seed}")
    if chance.random() < _SHARED:
        _share(scenario, seed, chance)
    chance = random.Random(f"membership {seed}")
    if chance.random() < _MEMBERSHIP:
        _change_membership(scenario, chance)
    chance = random.Random(f"bounds {seed}")
    if chance.random() < _SCALED:
        _change_bounds(scenario, chance)
    chance = random.Random(f"session {seed}")
    if chance.random() < _RECONNECTING:
        _break_links(scenario, chance)
    chance = random.Random(f"special {seed}")
    roll = chance.random()
    for share, shape in ((_ANNOUNCED, _announce), (_STOPPED, _press_ctrl_c), (_BAD_HOST, _break_a_host)):
        if roll < share:
            shape(scenario, chance)
            break
        roll -= share
    chance = random.Random(f"data {seed}")
    if chance.random() < _DATA:
        for run in [scenario, *scenario.others]:
            _draw_data(run, chance)
    chance = random.Random(f"validation {seed}")
    if chance.random() < _VALIDATED:
        for run in [scenario, *scenario.others]:
            run.validates, run.names_in_turn = True, False  # a name stays in use until its checkpoint is validated
            run.spec = msgspec.structs.replace(run.spec, has_validation=True)
    chance = random.Random(f"streams {seed}")
    if chance.random() < _STREAMED:
        _stream(scenario, chance)
    return scenario


def _clear(scenario: Scenario) -> None:
    """No fault, and a machine of ordinary speed."""
    scenario.faults, scenario.refusals, scenario.repeats = [], 0.0, 0.0
    scenario.storage_trouble = scenario.storage_fatal = 0.0
    scenario.agents_come_back = False
    scenario.storage_s, scenario.message_s, scenario.step_s = 0.02, 0.001, min(scenario.step_s, 0.2)
    for run in [scenario, *scenario.others]:
        run.poison = {}
        run.spec = msgspec.structs.replace(run.spec, progress_timeout_s=None)


def _announce(scenario: Scenario, chance: random.Random) -> None:
    """Nodes are taken away with notice, which some functions are too slow for; or they come and go without any."""
    _clear(scenario)
    scenario.only_announced = chance.random() < 0.7
    for run in [scenario, *scenario.others]:
        workers = max(2, run.spec.workers_max)
        run.spec = msgspec.structs.replace(
            run.spec,
            workers_min=chance.choice([1, 1, workers]),
            workers_max=workers,
            max_failures=chance.choice([-1, 0]) if scenario.only_announced else -1,
            max_preemption_failures=chance.choice([-1, -1, 0, 1]),
            resize_settle_s=chance.choice([0.5, 3.0]),
        )
        run.slots_per_node = 1
        run.iterations, run.checkpoint_every = chance.randint(15, 40), chance.choice([1, 4, 12])
        run.asks, run.names_in_turn = chance.random() < 0.3, False
    kinds = ["notice", "preempt", "notice", "preempt", "drain"] if scenario.only_announced else ["flap", "notice"]
    for kind in chance.choices(kinds, k=chance.randint(1, 3)):
        scenario.faults.append(Fault(chance.uniform(1.0, 8.0), kind))
    scenario.quiet_at = 12.0


def _press_ctrl_c(scenario: Scenario, chance: random.Random) -> None:
    """A stop waits for a last checkpoint, and no longer than it may."""
    _clear(scenario)
    scenario.grace_s = chance.choice([0.5, 3.0, 8.0])
    for run in [scenario, *scenario.others]:
        run.asks, run.names_in_turn = chance.random() < 0.6, False
        run.iterations, run.checkpoint_every = chance.randint(15, 40), chance.choice([3, 12])
    scenario.faults = [Fault(chance.uniform(1.0, 6.0), "stop") for _ in range(chance.randint(1, 2))]
    if chance.random() < 0.3:
        scenario.faults.append(Fault(chance.uniform(1.0, 6.0), chance.choice(["kill_node", "force_stop"])))
    scenario.quiet_at = 10.0


def _break_a_host(scenario: Scenario, chance: random.Random) -> None:
    """All workers of one host die soon. There are spare agents on others, or the run may go on with fewer workers."""
    _clear(scenario)
    scenario.others = []
    scenario.spec = msgspec.structs.replace(
        scenario.spec, max_failures=-1, spares=1, workers_min=scenario.spec.workers_max
    )
    scenario.agent_slots, scenario.runs_take_turns = 0, False
    scenario.hosts = -(-scenario.spec.workers_max // scenario.slots_per_node) + 1
    scenario.iterations = max(15, scenario.iterations)
    scenario.faults = [Fault(chance.uniform(0.0, 2.0), "break_host")]
    if chance.random() < 0.5:
        scenario.faults.append(Fault(chance.uniform(2.0, 20.0), chance.choice(["kill_node", "kill_worker"])))
    scenario.quiet_at = 40.0
    most, slots = scenario.spec.workers_max, scenario.slots_per_node
    if most > slots and chance.random() < 0.7:
        scenario.spec = msgspec.structs.replace(scenario.spec, spares=0, workers_min=most - slots)
        scenario.hosts -= 1


def _stream(scenario: Scenario, chance: random.Random) -> None:
    """Let nodes not see the storage, and workers and nodes die, so that others start from what neighbours have."""
    for run in [scenario, *scenario.others]:
        run.streams = True
    if scenario.only_announced:
        return
    for kind in chance.choices(["kill_worker", "kill_worker", "kill_node"], k=chance.randint(1, 3)):
        moment = chance.choice(["created", "created", "started", "part", "fetching"])
        scenario.faults.append(Fault(chance.uniform(0.0, scenario.quiet_at / 2), kind, moment, chance.randint(1, 4)))


def _draw_data(run: Scenario, chance: random.Random) -> None:
    """An epoch takes some steps, and seldom a whole number of them."""
    most = run.spec.workers_max
    batch_size = chance.choice([0, 1, 2])
    run.whole_parts = run.whole_parts and run.lockstep
    run.data = DataSet(
        size=chance.randint(4, 30),
        batch_size=batch_size,
        global_batch_size=0 if batch_size else chance.randint(most, most + 4),
        uneven=not run.lockstep and chance.random() < 0.5,
    )


def _change_membership(scenario: Scenario, chance: random.Random) -> None:
    """Drain agents, and let runs have fewer workers than they would take; half of the time nothing else happens."""
    if chance.random() < 0.5:
        scenario.faults, scenario.poison, scenario.refusals, scenario.repeats = [], {}, 0.0, 0.0
        scenario.storage_trouble = scenario.storage_fatal = 0.0
    for run in [scenario, *scenario.others]:
        workers = run.spec.workers_max
        run.spec = msgspec.structs.replace(
            run.spec,
            workers_min=chance.randint(1, workers),
            resize_settle_s=chance.choice([0.5, 2.0]),
            last_call_s=chance.choice([0.0, 1.0]),
        )
        run.asks = chance.random() < 0.4
        if run.asks:
            run.names_in_turn = False  # two checkpoints in a row may be due at any iterations
        run.iterations = max(run.iterations, 12)
        run.slots_per_node = chance.randint(1, workers)
    for _ in range(chance.randint(1, 4)):
        kind = chance.choice(["drain", "drain", "preempt", "kill_node"])
        if chance.random() < 0.4:
            scenario.faults.append(Fault(chance.uniform(0.0, scenario.quiet_at), kind))
        else:
            moment = chance.choice(["started", "part", "reserved", "uploaded", "created", "lost"])
            scenario.faults.append(
                Fault(chance.uniform(0.0, scenario.quiet_at / 2), kind, moment, chance.randint(1, 4))
            )


def _change_bounds(scenario: Scenario, chance: random.Random) -> None:
    """Let runs be elastic and keep spares, and users ask for other bounds; half of the time nothing else happens."""
    if chance.random() < 0.5:
        scenario.faults, scenario.poison, scenario.refusals, scenario.repeats = [], {}, 0.0, 0.0
        scenario.storage_trouble = scenario.storage_fatal = 0.0
    scenario.grace_s = chance.choice([0.0, 2.0])
    for run in [scenario, *scenario.others]:
        run.spec = msgspec.structs.replace(
            run.spec,
            workers_min=1,
            workers_max=max(2, run.spec.workers_max),
            spares=chance.choice([0, 0, 1]),
            resize_settle_s=chance.choice([0.5, 2.0]),
        )
        run.iterations = max(run.iterations, 15)
        run.asks = chance.random() < 0.4
        run.names_in_turn = run.names_in_turn and not run.asks
    kinds = ["scale"] * chance.randint(1, 4) + chance.choices(["kill_node", "drain", "kill_driver", "stop"], k=2)
    for kind in kinds:
        if chance.random() < 0.5:
            scenario.faults.append(Fault(chance.uniform(0.0, scenario.quiet_at), kind))
        else:
            moment = chance.choice(["started", "part", "reserved", "created", "lost"])
            scenario.faults.append(
                Fault(chance.uniform(0.0, scenario.quiet_at / 2), kind, moment, chance.randint(1, 4))
            )


def _break_links(scenario: Scenario, chance: random.Random) -> None:
    """Let agents come back, and give them reasons to; half of the time nothing else happens."""
    scenario.agents_come_back = True
    if chance.random() < 0.5:
        scenario.faults, scenario.poison, scenario.refusals, scenario.repeats = [], {}, 0.0, 0.0
        scenario.storage_trouble = scenario.storage_fatal = 0.0
    for kind in chance.choices(_LINK_FAULTS, k=chance.randint(1, 5)):
        if chance.random() < 0.4:
            scenario.faults.append(Fault(chance.uniform(0.0, scenario.quiet_at), kind))
        else:
            moment = chance.choice(["started", "part", "reserved", "uploaded", "created", "lost", "received"])
            scenario.faults.append(
                Fault(chance.uniform(0.0, scenario.quiet_at / 2), kind, moment, chance.randint(1, 4))
            )


def _share(scenario: Scenario, seed: int, chance: random.Random) -> None:
    """Add runs to the first one's, and agents that hold workers of several."""
    for number in range(1, chance.choice([2, 2, 3])):
        other = _draw_run(f"{seed} run {number}")
        other.iterations, other.pins = min(other.iterations, 12), []
        other.poison = {step: times for step, times in other.poison.items() if step <= other.iterations}
        scenario.others.append(other)
    scenario.agent_slots = chance.choice([0, 2, 3, 4, 6])
    scenario.runs_take_turns = chance.random() < 0.5


def _draw_run(seed: str) -> Scenario:
    chance = random.Random(f"scenario {seed}")
    workers = chance.choice([1, 1, 2, 2, 3, 4])
    hangs = chance.random() < 0.35
    iterations = chance.choice([chance.randint(1, 8), chance.randint(5, 30)])
    quiet_at = chance.uniform(1.0, 15.0)
    keep = chance.choice([None, None, 1, 2])
    spec = RunSpec(
        workers_min=chance.choice([workers, workers, chance.randint(1, workers)]),
        workers_max=workers,
        max_failures=chance.choice([-1, -1, -1, 0, 1, 3]),
        progress_timeout_s=chance.choice([2.0, 4.0]) if hangs else None,
        agents_timeout_s=30.0,
        backoff_base_s=0.5,
        backoff_max_s=4.0,
        lag_warning_s=chance.choice([0.5, 30.0]),
        retention=RetentionRule(keep, chance.choice([None, "noise"]) if keep else None),
    )
    scenario = Scenario(
        spec=spec,
        iterations=iterations,
        checkpoint_every=chance.choice([1, 2, 3, 5]),
        checkpoint_ranks=chance.choice(["first", "all", "all", "last"]),
        slots_per_node=chance.randint(1, workers),
        lockstep=chance.random() < 0.6,
        batch=chance.choice([1, 1, 3]),
        step_s=chance.choice([0.05, 0.2, 0.6]),
        message_s=chance.choice([0.001, 0.02, 0.1]),
        storage_s=chance.choice([0.002, 0.02, 0.15]),
        flush_s=chance.choice([0.25, 1.0]),
        quiet_at=quiet_at,
    )
    _draw_users(scenario, random.Random(f"users {seed}"))
    _draw_storage(scenario, random.Random(f"storage {seed}"))
    scenario.whole_parts = random.Random(f"whole parts {seed}").random() < 0.3
    scenario.waits_for_commits = random.Random(f"commits {seed}").random() < 0.15
    if chance.random() < 0.5:
        _sharpen(scenario, chance)
        return scenario
    kinds = chance.choices(_NAMES, _WEIGHTS, k=chance.choice([0, 1, 2, 3, 5, 8, 13]))
    usable = [kind for kind in kinds if hangs or kind != "hang_worker"]
    for kind in usable:
        if chance.random() < 0.5:
            scenario.faults.append(Fault(chance.uniform(0.0, quiet_at), kind))
        else:
            scenario.faults.append(
                Fault(chance.uniform(0.0, quiet_at / 2), kind, chance.choice(MOMENTS), chance.randint(1, 4))
            )
    if chance.random() < 0.3:
        scenario.poison = {chance.randint(1, iterations): chance.randint(1, 4)}
    if chance.random() < 0.3:
        scenario.storage_trouble = 0.05
        scenario.storage_fatal = chance.choice([0.0, 0.0, 0.003])
    if chance.random() < 0.2:
        scenario.refusals = 0.3
    if chance.random() < 0.3:
        scenario.repeats = 0.2
    return scenario


def _draw_users(scenario: Scenario, chance: random.Random) -> None:
    """What users do with checkpoints that retention may remove."""
    rule = scenario.spec.retention
    if rule.num_to_keep == 1 and rule.score_attribute is None and chance.random() < 0.5:
        scenario.names_in_turn = True
    elif rule.num_to_keep is not None and chance.random() < 0.5:
        scenario.pins = [chance.uniform(0.0, scenario.quiet_at) for _ in range(chance.randint(1, 6))]


def _draw_storage(scenario: Scenario, chance: random.Random) -> None:
    scenario.exclusive = chance.random() > 0.1
    scenario.tears = chance.random() < 0.2
    scenario.retries = chance.random() < 0.5
    scenario.one_machine = chance.random() < 0.7


_THEMES = ["duel", "overtake", "overtake", "settle", "crash", "crash", "crowd", "parts", "stuck", "away"]


def _sharpen(scenario: Scenario, chance: random.Random) -> None:
    """Aim at the races that blind chance seldom hits."""
    theme = chance.choice(_THEMES)
    scenario.checkpoint_every = 1
    scenario.lockstep = False
    spec = scenario.spec
    workers = max(2, spec.workers_max)
    budget = -1 if theme in ("parts", "stuck") else spec.max_failures
    timeout_s = 2.0 if theme == "stuck" else None
    scenario.spec = msgspec.structs.replace(
        spec, workers_min=workers, workers_max=workers, max_failures=budget, progress_timeout_s=timeout_s
    )
    if theme in ("duel", "settle", "overtake"):
        scenario.beat_s = chance.choice([3.0, 30.0])
    if theme == "duel":
        scenario.storage_s, scenario.message_s = 0.15, 0.001
        aims = [
            ("take_over", "flushed"),
            ("take_over", "reserved"),
            ("take_over", "uploaded"),
            ("kill_driver", "leased"),
        ]
    elif theme == "crowd":
        scenario.storage_s, scenario.message_s, scenario.step_s = 0.15, 0.001, 0.05
        aims = [("take_over", "started"), ("take_over", "leased"), ("take_over", "flushed"), ("take_over", "reserved")]
        scenario.exclusive = chance.random() < 0.5
    elif theme == "overtake":
        scenario.storage_s, scenario.message_s, scenario.step_s = 0.02, 0.001, 0.05
        aims = [("overtake", "request"), ("overtake", "request"), ("overtake", "leased"), ("take_over", "reserved")]
    elif theme == "settle":
        scenario.storage_s, scenario.message_s, scenario.step_s, scenario.names_in_turn = 0.02, 0.001, 0.05, False
        scenario.faults = [
            Fault(0.0, "overtake", "surveyed", chance.randint(2, 6)),
            Fault(0.0, "overtake", "positioned", 2),
        ]
        scenario.quiet_at = 15.0
        return
    elif theme == "crash":
        scenario.checkpoint_ranks, scenario.step_s, scenario.slots_per_node = "all", 0.05, 1
        scenario.tears = chance.random() < 0.7
        aims = [("kill_driver", "write"), ("kill_driver", "write"), ("kill_driver", "uploaded"), ("kill_node", "part")]
    elif theme == "away":
        scenario.outage_s = 12.0
        aims = [("outage", "flushed"), ("outage", "lost"), ("outage", "started"), ("kill_node", "started")]
    elif theme == "parts":
        scenario.slots_per_node, scenario.checkpoint_ranks, scenario.step_s = 1, "all", 0.2
        scenario.message_s = 0.1
        aims = [("kill_node", "part"), ("cut_link", "part"), ("kill_node", "lost")]
    else:
        scenario.checkpoint_ranks, scenario.step_s = "all", 0.05
        aims = [("hang_worker", "started"), ("hang_worker", "part"), ("kill_driver", "part")]
    for kind, moment in chance.choices(aims, k=chance.randint(1, 5)):
        when = chance.uniform(0.0, scenario.quiet_at / 2)
        count = chance.randint(1, {"request": 200, "write": 40}.get(moment, 3))
        scenario.faults.append(Fault(when, kind, moment, count))
