"""Runs an engine of several replicas in virtual time, with faults: from `Engine.add` to the messages of each rank.

The code is the engine's own: `Engine`, `DPRouter`, `WorkerGroup`, `WatchedProcess`, `Channel` at both ends, `serve`
of each engine process with `Replica`, `Scheduler` and `MultiprocExecutor`. This file supplies the client, the
processes, the bytes between them (late, in pieces, through small buffers, or lost), and ranks that agree and sample.

Invariants (I7, that a replica which fails takes no part in another step, is checked by `replica_simulator.py`):

- I1: all ranks of an epoch enter the same collectives in the same rounds.
- I2: each expert of each layer has a slot, on the rank where tokens are sent to it.
- I3: a request ends exactly once. A client's request that it did not abort ends complete, or with an error that has a
  cause; without on_failure="end" it ends complete, unless too many failures follow each other without a token of it.
- I4: an idle engine has no work, and its router knows of no load.
- I5: the ranks of a replica run as many tokens as it has announced.
- I6: the numbers of a replica's rounds only grow.
- I8: copies of an expert are of the same version.
- I9: epochs only grow, and a rank that serves is in the last one.
- I10: the tokens that a client has are the first ones of those computed: none is lost, withdrawn or sent twice.
- I11: a rank is dead before another one takes its place.
- I12: after an update of weights has ended, no token comes from older weights, also if the engine restarts meanwhile.
- pause: between the end of a pause and the next resume no request gets a token, also if the engine restarts meanwhile.
  A control ends, with an error only if the engine has failed.
- false death: without a fault no process is declared dead, however slowly it loads or steps within the timeouts.
- deadlock: a fault is noticed, and every call returns, within virtual seconds that follow from the timeouts.
- slow: with on_failure="end", requests end within 5 s of a failure, and of a hang within the timeouts.
- crash: a call of the client raises nothing but the named errors.
- orphans: after the shutdown no process is left, and every worker group was released once.
- survivors: with on_failure="recover", a rank that is killed or raises is the only one whose weights are loaded again.
  Ranks that are left keep their process and their experts when others are left out.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from scenario import BLOCK_SIZE, END_TOKEN, HEARTBEAT_S, MAX_MODEL_LEN, InvariantViolation, sampled_token, whole_output
from simulated_processes import BUFFER_BYTES, SimulatedProcess
from simulated_weights import HeldExperts, check_experts, model_folder, placements_of
from virtual_time import World

from moeserve.addresses import StoreAddress
from moeserve.config.engine_config import EngineConfig
from moeserve.config.facts import CheckpointFacts, MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.controls import (
    INITIAL_VERSION,
    PAUSE_MODES,
    Command,
    ControlResult,
    FinishUpdate,
    Outcome,
    Pause,
    Resume,
    StartUpdate,
)
from moeserve.engine.engine import Engine
from moeserve.engine.in_flight import MAX_FRUITLESS_RESTARTS
from moeserve.engine.launcher import WorkerGroup
from moeserve.engine.protocol import FromReplica, ToReplica
from moeserve.engine.replica_process import serve_epochs
from moeserve.errors import (
    CheckpointError,
    DistributedError,
    EngineError,
    RequestError,
    ScaleError,
    ScalingInProgressError,
    StaleWeightsError,
)
from moeserve.processes.channel import Channel
from moeserve.processes.failures import report_of
from moeserve.processes.supervision import WatchedProcess, collect_failures
from moeserve.protocol import ChunkResult, Request, RequestUpdate, StepPlan, StepResult
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import Agreement, Round, RoundResult, agree
from moeserve.worker.protocol import Faulted, FromRank, Leave, Loaded, RankStart, Rejoin, ToRank
from moeserve.worker.request_table import RequestTable

STEP_TIMEOUT_S, LOAD_TIMEOUT_S, COLLECTIVE_TIMEOUT_S = 20, 60, 10
NUM_BLOCKS = 20
# A hang is noticed after two step timeouts without a message, and the engine is loaded again. Three times, at most.
LONGEST_S = 400.0
SECONDS_TO_JOIN = 30.0  # for replicas that were left out
TURNS_OF_A_REPLICA = 30_000  # more than any run takes

Fault: TypeAlias = Literal[
    "none",
    "kill engine",
    "kill rank",
    "stop engine",
    "stop rank",
    "raise",  # in a rank, during a step
    "cut to",  # bytes to an engine process are lost, silently
    "cut from",
    "close",  # the connection to an engine process ends
]
Reload: TypeAlias = Literal["well", "slow", "fails once", "hangs once"]  # loading after a failure


class Point(NamedTuple):
    """A moment at which a rank is killed."""

    epoch: int
    replica: int
    round: int  # -1: before it joins the others


@dataclass(frozen=True, kw_only=True)
class EngineScenario:
    """Everything that determines a run. Times are virtual seconds."""

    seed: int
    num_replicas: int = 3
    num_requests: int = 20
    on_failure: Literal["end", "restart", "recover", "shrink"] = "restart"
    fault: Fault = "none"
    fault_s: float = 0.0  # after the first request
    reload: Reload = "well"
    load_s: float = 1.0
    stall_s: float = 0.0  # of some steps
    abort_share: float = 0.2
    bad_share: float = 0.1  # requests that cannot be encoded
    num_pauses: int = 0  # each followed by a resume
    kills: frozenset[Point] = frozenset()  # where ranks are killed, besides the fault
    num_refusals: int = 0  # of ranks that are started later and cannot load, so that replicas are left out
    span_s: float = 3.0  # in which requests arrive

    @classmethod
    def drawn(cls, seed: int) -> EngineScenario:
        """Return a random scenario that follows from the seed."""
        dice = random.Random(seed)
        return cls(
            seed=seed,
            num_replicas=dice.choice([1, 2, 3]),
            on_failure=dice.choice(["end", "restart", "recover"]),
            fault=dice.choice(list(Fault.__args__)),  # type: ignore[attr-defined]
            fault_s=dice.uniform(0.0, 3.0),
            reload=dice.choice(list(Reload.__args__)),  # type: ignore[attr-defined]
            load_s=dice.choice([0.1, 5.0, 0.9 * LOAD_TIMEOUT_S]),
            stall_s=dice.choice([0.0, 0.0, 0.8 * COLLECTIVE_TIMEOUT_S]),
            num_pauses=dice.choice([0, 1, 3]),
        )

    @classmethod
    def history(cls, num_replicas: int, seed: int) -> EngineScenario:
        """Return a random history of kills, recoveries, replicas that are left out, and replicas that join again."""
        dice = random.Random(f"{num_replicas} {seed}")

        def point(epoch: int) -> Point:
            return Point(epoch, dice.randrange(num_replicas), dice.randrange(-1 if epoch else 0, 4))

        on_failure, epochs = dice.choice(["recover", "recover", "shrink"]), dice.choice([(0,), (0, 1), (0, 0, 1, 2)])
        return cls(
            seed=seed,
            num_replicas=num_replicas,
            num_requests=max(20, num_replicas // 2),
            on_failure=on_failure,
            load_s=dice.choice([0.1, 1.0]),
            abort_share=0.1,
            bad_share=0.0,
            kills=frozenset(map(point, epochs)),
            num_refusals=dice.choice([0, 1, 2]) if on_failure == "recover" else 0,
            span_s=1.0,
        )


def config_of(scenario: EngineScenario, num_replicas: int | None = None) -> EngineConfig:
    settings = {
        "data_parallel_size": num_replicas or scenario.num_replicas,
        "executor": "mp",
        "on_failure": scenario.on_failure,
        "step_timeout": STEP_TIMEOUT_S,
        "load_timeout": LOAD_TIMEOUT_S,
        "collective_timeout": COLLECTIVE_TIMEOUT_S,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 3,
        "rl": True,
        "max_num_batched_tokens": 8,
        "block_size": BLOCK_SIZE,
    }
    num_experts = max(8, scenario.num_replicas)
    facts = CheckpointFacts(
        path=model_folder(num_experts),
        dtype="bfloat16",
        vocab_size=100,
        max_position_embeddings=MAX_MODEL_LEN,
        tensor_parallel_sizes=(1,),
        num_layers=2,
        num_sparse_layers=2,
        num_experts=num_experts,
    )
    return resolve(parse_settings(settings), facts, MachineFacts(num_cores=scenario.num_replicas))


class _Ranks:
    """The collectives of the ranks of one worker group in one epoch, and their model."""

    def __init__(self, simulation: _EngineSimulation, config: EngineConfig) -> None:
        self.simulation, self.world, self.scenario = simulation, simulation.world, simulation.scenario
        self.num_replicas = config.parallel.data_parallel_size
        self.placements = placements_of(config)
        self.members: dict[int, SimulatedProcess] = {}  # that have joined, by replica
        self.experts: dict[int, HeldExperts] = {}  # of members
        self.kinds: dict[int, str] = {}  # what all ranks do in a round
        self.numbers: dict[int, int] = {}  # of the last round, by replica
        self.is_broken = False  # a rank has left the epoch or ended, or the store where ranks meet is closed
        self.rows: dict[int, dict[int, list[int]]] = {}  # by round and replica
        self.steps: dict[int, set[int]] = {}  # replicas that have entered the step of a round
        self.outcomes: dict[int, Outcome] = {}  # of commands that concern weights, by round
        self.is_updating = False

    def execute(self, replica: int, table: RequestTable, number: int, work: Round) -> RoundResult:
        self.rows.setdefault(number, {})[replica] = work.row
        self._wait_for_all(self.rows[number])
        rows = [self.rows[number][index] for index in range(self.num_replicas)]
        agreement = agree(rows, number=number, num_replicas=len(rows))
        self._check_round(replica, work, agreement)
        if agreement.is_idle or agreement.ends_all:
            return RoundResult(agreement=agreement)
        if agreement.control and isinstance(work.command, StartUpdate | FinishUpdate):
            if number not in self.outcomes:  # the first rank to come here
                error = "" if self.is_updating or isinstance(work.command, StartUpdate) else "no update has begun"
                self.is_updating = isinstance(work.command, StartUpdate)
                self.outcomes[number] = Outcome(
                    error=error, is_open=self.is_updating, is_whole=not self.is_updating and not error
                )
            self.experts[replica].version += self.outcomes[number].is_whole
            return RoundResult(agreement=agreement, outcome=self.outcomes[number])
        return self._step(replica, table, agreement, work.plan)

    def _step(self, replica: int, table: RequestTable, agreement: Agreement, plan: StepPlan | None) -> RoundResult:
        dice = self.world.dice
        stall_s = self.scenario.stall_s if dice.random() < 0.02 else 0.0
        self.world.wait(lambda: False, stall_s + dice.uniform(0.001, 0.02))
        entered = self.steps.setdefault(agreement.number, set())
        entered.add(replica)
        self._wait_for_all(entered)
        if plan is None:
            return RoundResult(agreement=agreement, result=StepResult(step=0, chunks=[]))
        chunks = table.apply(plan)
        results = [
            ChunkResult(
                token_ids=[sampled_token(chunk.request.seed, chunk.request.num_output_tokens)] if chunk.samples else []
            )
            for chunk in chunks
        ]
        table.append_tokens(chunks, [token_id for each in results for token_id in each.token_ids])
        return RoundResult(agreement=agreement, result=StepResult(step=plan.step, chunks=results))

    def _check_round(self, replica: int, work: Round, agreement: Agreement) -> None:
        require, number = self.simulation.require, agreement.number
        kind = "idle" if agreement.is_idle else "end" if agreement.ends_all else f"control {agreement.control}"
        require(self.kinds.setdefault(number, kind) == kind, "I1", f"{replica} enters {kind} in round {number}")
        require(number > self.numbers.get(replica, -1), "I6", f"{replica} runs round {number} after a later one")
        self.numbers[replica] = number
        num_tokens = work.plan.num_tokens if work.plan else 0
        is_announced = agreement.is_idle or agreement.ends_all or num_tokens == agreement.num_tokens[replica]
        require(is_announced, "I5", f"{replica} runs {num_tokens} tokens in round {number}: {agreement}")

    def join(self, replica: int, process: SimulatedProcess, experts: HeldExperts) -> None:
        """Wait until all ranks have joined this epoch."""
        simulation = self.simulation
        experts.take(self.placements, replica, simulation.require)
        self.members[replica], self.experts[replica] = process, experts
        process.when_ended.append(self.leave)
        if len(self.members) == self.num_replicas and not self.is_broken:
            held = [self.experts[index] for index in range(self.num_replicas)]
            check_experts(self.placements, held, simulation.require)
            simulation.check_survivors(self.members)
        self._wait_for_all(self.members, LOAD_TIMEOUT_S)

    def leave(self) -> None:
        self.is_broken = True

    def _wait_for_all(self, entered: Any, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        self.world.wait(lambda: len(entered) == self.num_replicas or self.is_broken, timeout_s)
        if len(entered) < self.num_replicas:
            raise DistributedError("a collective has failed, or has not ended in time")


@dataclass(eq=False)
class _Sent:
    """The client's state of a request."""

    request: Request
    first_failure: int  # number of the engine's first failure that may have come after the last token
    token_ids: list[int] = field(default_factory=list)
    end: RequestUpdate | None = None
    was_aborted: bool = False


@dataclass(frozen=True)
class EngineReport:
    num_groups: int  # worker groups that were started
    num_left_out: int  # times that replicas were left out
    num_killed: int
    ends: dict[str, int]
    virtual_s: float
    num_turns: int


def simulate_engine(
    scenario: EngineScenario,
    engine_class: type[Engine] = Engine,
    channel_class: type[Channel[Any]] = Channel,
) -> EngineReport:
    """Run a scenario to its end.

    Args:
        engine_class: as the client makes it.
        channel_class: of all processes.

    Raises:
        InvariantViolation: an invariant did not hold.
    """
    simulation = _EngineSimulation(scenario, engine_class, channel_class)
    try:
        simulation.world.run(simulation.client)
    except InvariantViolation as violation:
        raise InvariantViolation(violation.invariant, f"{scenario}: {violation}") from violation
    except Exception as error:
        raise InvariantViolation("crash", f"{scenario}: {error!r}") from error
    finally:
        for process in simulation.processes:
            process.end("the simulation has ended")
            process.close()
    return simulation.report()


class _Starter:
    """The replicas of one worker group. See `Starter`."""

    def __init__(self, simulation: _EngineSimulation, config: EngineConfig) -> None:
        self._simulation, self._config = simulation, config
        self._store = StoreAddress(key="")
        self.has_lost_host = False
        self._open()

    def begin_epoch(self, config: EngineConfig, survivors: Sequence[int]) -> None:
        self._simulation.ranks[self._store.key].is_broken = True
        self._simulation.leave_out(survivors)
        self._config = config
        self._open()

    def message(self, replica: int, epoch: int, num_blocks: int | None, chunk_size: int | None) -> RankStart:
        return RankStart(
            config=self._config,
            rank=replica,
            store=self._store,
            epoch=epoch,
            num_blocks=num_blocks,
            chunk_size=chunk_size,
        )

    def watch(self) -> None:
        return None

    def start(
        self, replica: int, epoch: int = 0, num_blocks: int | None = None, chunk_size: int | None = None
    ) -> WatchedProcess[Any]:
        simulation, start = self._simulation, self.message(replica, epoch, num_blocks, chunk_size)
        engine = simulation.new_process(f"engine of replica {replica}", functools.partial(simulation.run_engine, start))
        simulation.engines[replica : replica + 1] = [engine]
        return simulation.watched(engine, FromReplica)

    def _open(self) -> None:
        simulation = self._simulation
        self._store = StoreAddress(key=str(len(simulation.ranks)))
        simulation.ranks[self._store.key] = _Ranks(simulation, self._config)


class _Rank:
    """The loop of a simulated rank that has loaded the model. See `RankLoop`."""

    def __init__(
        self, simulation: _EngineSimulation, start: RankStart, channel: Channel[Any], process: SimulatedProcess
    ) -> None:
        self._simulation, self._start, self._channel, self._process = simulation, start, channel, process
        self._is_out_of_step = False
        self._experts = HeldExperts()
        self._epoch = -1

    def run(self) -> None:
        self._join(self._start.epoch, self._start.store)
        while True:
            for message in self._channel.receive(None):
                if isinstance(message, Leave):
                    return
                if isinstance(message, Rejoin):
                    self._ranks.is_broken = True
                    self._start = message.start
                    self._trying(functools.partial(self._join, message.start.epoch, message.start.store))
                elif not self._is_out_of_step:
                    self._trying(functools.partial(self._execute, message))

    def _trying(self, act: Callable[[], None]) -> None:
        try:
            act()
        except DistributedError as error:
            if not self._start.config.recovers_in_place:
                raise
            self._ranks.is_broken = self._is_out_of_step = True
            self._channel.send(Faulted(self._epoch, report_of(error, self._process.name)))

    def _join(self, epoch: int, store: StoreAddress) -> None:
        simulation, before = self._simulation, self._epoch
        simulation.require(epoch > before, "I9", f"{self._process.name} enters epoch {epoch} after {before}")
        self._epoch, self._ranks, self._number = epoch, simulation.ranks[store.key], -1
        self._may_be_killed()
        self._ranks.join(self._start.rank, self._process, self._experts)
        self._table = RequestTable(self._start.config.schedule.max_num_seqs, MAX_MODEL_LEN // BLOCK_SIZE)
        self._number, self._is_out_of_step = 0, False
        self._channel.send(Loaded(NUM_BLOCKS, epoch=epoch))

    def _may_be_killed(self) -> None:
        """End this process if it is at a point where it is to be killed. Each point counts once."""
        point, simulation = Point(self._epoch, self._start.rank, self._number), self._simulation
        if point in simulation.kills:
            simulation.kills.discard(point)
            simulation.victims.append(self._process)
            simulation.fault_at = simulation.world.now
            self._process.kill()
            simulation.world.wait(lambda: False)

    def _execute(self, message: Round) -> None:
        simulation, replica = self._simulation, self._start.rank
        self._may_be_killed()
        if simulation.raises_in == replica:
            simulation.raises_in = None
            simulation.fault_at = simulation.world.now
            raise ZeroDivisionError("planted")
        result = self._ranks.execute(replica, self._table, self._number, message)
        self._number += 1
        self._channel.send(result)
        self._is_out_of_step = result.agreement.ends_all


class _EngineSimulation:
    def __init__(self, scenario: EngineScenario, engine_class: type[Engine], channel_class: type[Channel[Any]]) -> None:
        self.scenario = scenario
        self.engine_class = engine_class
        self.channel_class = channel_class
        self.world = World(scenario.seed, LONGEST_S, TURNS_OF_A_REPLICA * scenario.num_replicas)
        self.processes: list[SimulatedProcess] = []
        self.engines: list[SimulatedProcess] = []  # of the newest group
        self.num_groups = self.num_released = self.num_loads = 0  # loads of ranks
        self.group_sizes: list[int] = []
        self.has_hung = False  # while it loaded
        self.kills = set(scenario.kills)
        self.victims: list[SimulatedProcess] = []  # that were killed there
        self.settled: list[SimulatedProcess] = []  # the ranks that have served together last
        self.num_refusals = scenario.num_refusals
        self.num_left_out = 0  # epochs that began with fewer replicas
        self.ranks: dict[str, _Ranks] = {}  # by store
        self.raises_in: int | None = None  # the replica whose rank fails in its next step
        self.fault_at: float | None = None
        self.pauses = scenario.num_pauses  # that are not resumed yet
        self.version = 0  # number of updates that have ended
        self.is_paused = False  # a pause has ended, and no resume was sent
        self.may_abort = False  # a pause was sent that aborts requests, perhaps also those sent before it ends
        self.due: list[Callable[[], None]] = []  # actions of the client
        self.sent: dict[str, _Sent] = {}
        self.num_left = scenario.num_requests
        self.engine: Any = None
        self.num_failures = 0  # that the engine has noticed
        self.num_failures_before = 0  # of these, until the end of the client's last step

    # Processes. A `Launcher`.

    def start(self, config: EngineConfig) -> WorkerGroup:
        self.num_groups += 1
        self.group_sizes.append(config.parallel.data_parallel_size)
        if self.num_groups == 2 and self.scenario.reload == "fails once":
            raise EngineError("no resources yet")
        starter = _Starter(self, config)
        group = WorkerGroup(release=self.release, starter=starter)
        self.engines = []
        for replica in range(config.parallel.data_parallel_size):
            group.replicas.append(starter.start(replica))
        return group

    def close(self) -> None:
        pass

    def release(self) -> None:
        self.num_released += 1

    def new_process(self, name: str, run: Callable[[SimulatedProcess], None]) -> SimulatedProcess:
        process = SimulatedProcess(self.world, name, run)
        self.processes.append(process)
        return process

    def watched(self, process: SimulatedProcess, incoming: Any) -> WatchedProcess[Any]:
        watched: WatchedProcess[Any] = WatchedProcess(process.name, process.link.ours, incoming, process)
        watched.channel.__class__ = self.channel_class
        return watched

    def run_engine(self, start: RankStart, process: SimulatedProcess) -> None:
        """Do what `replica_process.run` does."""
        channel = self.channel_class(process.link.theirs, ToReplica)

        def start_rank(first: RankStart, number: int) -> WatchedProcess[Any]:
            alive = [rank for rank in process.children if rank.exit_cause() is None]
            self.require(not alive, "I11", f"{alive} still run")
            rank = self.new_process(f"rank {number}", functools.partial(self.run_rank, first))
            process.children.append(rank)
            return self.watched(rank, FromRank)

        ranks = [start_rank(start, start.rank)]
        try:
            serve_epochs(channel, start, process.name, ranks, start_rank)
        except Exception as error:
            process.fail(channel, collect_failures(ranks, [report_of(error, process.name)]))

    def run_rank(self, start: RankStart, process: SimulatedProcess) -> None:
        """Do what `rank_process.run` does."""
        channel = self.channel_class(process.link.theirs, ToRank)
        self.num_loads += 1
        is_reload = self.num_loads > self.scenario.num_replicas
        if is_reload and self.num_refusals:
            self.num_refusals -= 1
            self.fault_at = self.world.now
            process.fail(channel, [report_of(CheckpointError("planted"), process.name)])
            return
        hangs = is_reload and self.scenario.reload == "hangs once" and not self.has_hung
        self.has_hung |= hangs
        slow = is_reload and self.scenario.reload == "slow"
        self.world.wait(lambda: False, None if hangs else 0.9 * LOAD_TIMEOUT_S if slow else self.scenario.load_s)
        try:
            _Rank(self, start, channel, process).run()
        except Exception as error:
            process.fail(channel, [report_of(error, process.name)])

    def leave_out(self, survivors: Sequence[int]) -> None:
        """Note which replicas are left when an epoch begins."""
        self.num_left_out += len(self.settled) > len(survivors)
        self.settled = [self.settled[index] for index in survivors if index < len(self.settled)]

    def check_survivors(self, members: dict[int, SimulatedProcess]) -> None:
        """Check that each rank that has served before, and was not killed, is a member of the epoch that begins."""
        lost = [each.name for each in self.settled if each not in members.values() and each not in self.victims]
        may_replace_all = not self.scenario.kills or len(self.settled) != len(members)
        self.require(not lost or may_replace_all, "survivors", f"{lost} were replaced")
        self.settled = [members[index] for index in range(len(members))]

    def inject_fault(self) -> None:
        fault, replica = self.scenario.fault, self.world.dice.randrange(self.scenario.num_replicas)
        engine = self.engines[replica]
        self.fault_at = self.world.now
        rank = engine.children[0]
        match fault:
            case "kill engine":
                engine.kill()
            case "kill rank":
                rank.kill()
            case "stop engine":
                engine.task.is_stopped = True
            case "stop rank":
                rank.task.is_stopped = True
            case "raise":
                self.raises_in = replica
            case "cut to":
                engine.link.to.is_cut = True
            case "cut from":
                engine.link.back.is_cut = True
            case "close":
                engine.link.close()

    # The client

    def client(self) -> None:
        scenario, dice, world = self.scenario, self.world.dice, self.world
        try:
            self.engine = engine = self.engine_class(
                config_of(scenario),
                self,
                config_of=functools.partial(config_of, scenario),
                run_in_background=functools.partial(world.start, "scaling"),
            )
        except EngineError as error:
            raise InvariantViolation("false death", str(error)) from error
        engine._fail = functools.partial(self.note_failure, engine._fail)
        begun_s = world.now
        for number in range(scenario.num_requests):
            world.at(begun_s + dice.uniform(0.0, scenario.span_s), functools.partial(self.queue, self.add, number))
        if scenario.fault != "none":
            world.at(begun_s + scenario.fault_s, self.inject_fault)
        if scenario.num_pauses:
            world.at(begun_s + dice.uniform(0.0, 1.0), functools.partial(self.queue, self.pause))
        while self.num_left or self.pauses or self.due or engine.has_work:
            due, self.due = self.due, []
            for action in due:
                action()
            if engine.has_work:
                with self.named_errors():
                    self.take_step()
            elif (self.num_left or self.pauses) and not self.due:
                world.wait(lambda: self.due, 10 * STEP_TIMEOUT_S)
        self.check_requests()
        self.renew_weights()
        self.wait_for_all_replicas()
        if scenario.fault == "none" or scenario.on_failure != "end":
            self.check_idle()
        is_seen = scenario.fault in ("kill rank", "raise", "kill engine") and self.fault_at is not None
        if scenario.kills:
            self.check_loads()
        if scenario.on_failure == "recover" and is_seen and scenario.reload == "well" and self.version == 0:
            is_only_one = (self.num_groups, self.num_loads - scenario.num_replicas) <= (1, 1)
            self.require(is_only_one, "survivors", f"{self.num_groups} groups, {self.num_loads} loads")
        engine.shutdown()
        alive = [process.name for process in self.processes if process.exit_cause() is None]
        self.require(not alive, "orphans", f"these are left: {alive}")
        num_started = self.num_groups - (self.num_groups > 1 and scenario.reload == "fails once")
        self.require(self.num_released == num_started, "orphans", f"{self.num_released} releases of {num_started}")
        if scenario.fault == "none" and not scenario.kills:
            self.require(self.num_groups == 1, "false death", f"{self.num_groups} groups were started")

    def wait_for_all_replicas(self) -> None:
        """Send requests until replicas that were left out have joined again."""
        engine, scenario, number = self.engine, self.scenario, 10**5
        latest_s = self.world.now + SECONDS_TO_JOIN
        while scenario.kills and len(engine.replica_stats) < scenario.num_replicas:
            if scenario.on_failure == "shrink":
                with contextlib.suppress(ScalingInProgressError):
                    self.scale()
            self.require(self.world.now < latest_s, "survivors", "replicas that were left out do not join again")
            self.add(number)
            number += 1
            while engine.has_work:
                self.take_step()
            self.world.wait(lambda: False, HEARTBEAT_S)

    def scale(self) -> None:
        """Let replicas join that were left out. A failure meanwhile may cancel that."""

        def note(done: Future[None]) -> None:
            error = done.exception()
            self.require(error is None or isinstance(error, ScaleError), "crash", f"scaling fails: {error}")

        self.engine.scale(self.scenario.num_replicas).add_done_callback(note)

    def check_loads(self) -> None:
        """Check that no rank has loaded the model but those of new replicas, and those that replace others."""
        kills, num_killed = self.scenario.kills, len(self.victims)
        num_refused = self.scenario.num_refusals - self.num_refusals
        # Those that are about to join are replaced too if another one fails meanwhile, or its failure is noticed then.
        num_late = sum(point.round < 0 for point in kills) + len(kills) - len({point.epoch for point in kills})
        num_most = (num_killed + num_refused) * (1 + num_late)
        num_loads = self.num_loads - sum(self.group_sizes)
        is_kept = num_loads <= num_most and (self.num_left_out or num_killed <= num_loads)
        what = f"{self.group_sizes} replicas, {num_loads} loads, {num_killed} kills, {num_refused} refusals"
        self.require(is_kept and (self.num_groups == 1 or self.num_left_out > 0), "survivors", what)
        # A rank can be replaced unless it cannot load, or three others fail meanwhile.
        may_leave_out = self.scenario.on_failure == "shrink" or num_refused > 0 or num_killed > 3
        self.require(may_leave_out or not self.num_left_out, "survivors", f"replicas were left out: {what}")

    def renew_weights(self) -> None:
        """Update the weights if they are stale after a failure."""
        if self.engine.weights.is_stale and not self.engine.refusal:
            self.run_control(StartUpdate())
            self.run_control(FinishUpdate(version=str(self.version + 1), salt=b"new"))
            weights = self.engine.weights
            self.require(not weights.is_stale, "I12", f"the weights are stale after an update: {weights}")

    def run_control(self, command: Command) -> None:
        ended = self.engine.control(command)
        while not ended.done():
            self.take_step()

    def queue(self, action: Callable[..., None], *arguments: Any) -> None:
        """Let the client act, as another of its threads would."""
        self.due.append(functools.partial(action, *arguments))
        self.engine.wake()

    @contextlib.contextmanager
    def named_errors(self) -> Any:
        try:
            yield
        except EngineError as error:
            is_stale = isinstance(error, StaleWeightsError) and self.fault_at is not None
            self.require(self.may_fail or is_stale, "crash", f"a call fails: {error}")

    def add(self, number: int) -> None:
        dice = self.world.dice
        self.num_left -= 1
        salt = "x" * dice.choice([1, 100, 3 * BUFFER_BYTES])
        is_bad = dice.random() < self.scenario.bad_share
        request = Request(
            request_id=str(number),
            prompt_token_ids=list(range(dice.randint(1, 20))),
            params=RequestParams(max_tokens=dice.randint(1, 16)),
            seed=number,
            eos_token_ids=[END_TOKEN],
            cache_salt=salt + ("\udc00" if is_bad else ""),
        )
        num_failures = self.num_failures
        try:
            with self.named_errors():
                self.engine.add(request)
                self.sent[request.request_id] = _Sent(request, num_failures, was_aborted=self.may_abort)
        except RequestError:
            self.require(is_bad, "crash", f"request {number} was refused")
            return
        if dice.random() < self.scenario.abort_share:
            self.world.at(self.world.now + dice.expovariate(5.0), functools.partial(self.queue, self.abort, number))

    def pause(self) -> None:
        if self.world.dice.random() < 0.5:
            self.start_update()
            return
        mode = self.world.dice.choice(PAUSE_MODES)
        if mode == "abort":
            self.may_abort = True
            for known in self.sent.values():
                known.was_aborted |= known.end is None
        self.control(Pause(mode=mode), self.resume, self.world.dice.uniform(0.0, 3.0))

    def resume(self) -> None:
        self.is_paused = self.may_abort = False
        self.control(Resume(), self.pause, self.world.dice.uniform(0.0, 1.0))

    def start_update(self) -> None:
        self.control(StartUpdate(), self.finish_update, self.world.dice.uniform(0.0, 0.5))

    def finish_update(self) -> None:
        """Finish an update, with the next version, or begin it again if the engine has restarted."""
        is_lost = not self.engine.weights.is_updating
        if is_lost:
            self.require(self.fault_at is not None, "I12", f"an update is lost: {self.engine.weights}")
            self.start_update()
            return
        self.control(FinishUpdate(version=str(self.version + 1), salt=b"new"), self.pause, 0.5)

    def note_update(self, result: ControlResult | None) -> None:
        """Note the end of an update, or begin it again after a failure."""
        if result is None or result.outcome is None or result.outcome.error:
            self.require(self.fault_at is not None, "I12", f"an update fails: {result}")
            self.world.at(self.world.now + 0.5, functools.partial(self.queue, self.start_update))
            return
        self.version += 1

    def control(self, command: Command, then: Callable[[], None], delay_s: float) -> None:
        """Run a command, and then act after a delay."""

        def note(ended: Future[ControlResult]) -> None:
            error = ended.exception()
            self.require(error is None or self.fault_at is not None, "pause", f"{command} fails: {error}")
            self.is_paused = self.engine.is_paused
            if isinstance(command, FinishUpdate):
                version = self.version
                self.note_update(None if error is not None else ended.result())
                if self.version == version:
                    return
            self.pauses -= isinstance(command, Resume | FinishUpdate)
            if self.pauses:
                self.world.at(self.world.now + delay_s, functools.partial(self.queue, then))

        try:
            self.engine.control(command).add_done_callback(note)
        except EngineError as error:
            self.require(self.may_fail, "crash", f"a call fails: {error}")
            self.pauses = 0

    def abort(self, number: int) -> None:
        known = self.sent.get(str(number))
        if known is not None and known.end is None:
            known.was_aborted = True
            self.engine.abort(str(number))

    def note_failure(self, fail: Callable[[str], None], error: str) -> None:
        self.num_failures += 1
        fail(error)

    def take_step(self) -> None:
        """Let the engine take a step, and check the updates that it returns."""
        updates = self.engine.step()
        num_before, self.num_failures_before = self.num_failures_before, self.num_failures
        for update in updates:
            version = 0 if update.weight_version == INITIAL_VERSION else int(update.weight_version)
            is_new = version >= self.version or not update.token_ids
            self.require(is_new, "I12", f"a token of older weights than {self.version}: {update}")
            is_quiet = not (self.is_paused and update.token_ids)
            self.require(is_quiet, "pause", f"a token during a pause: {update}")
            self.require(update.request_id in self.sent, "I3", f"a request that was refused has an update: {update}")
            known = self.sent[update.request_id]
            self.require(known.end is None, "I3", f"an update after the end: {update}")
            known.token_ids += update.token_ids
            if update.token_ids:
                known.first_failure = num_before
            tokens, finish_reason = whole_output(known.request)
            begun = known.token_ids == tokens[: len(known.token_ids)]
            self.require(begun, "I10", f"request {update.request_id} has {known.token_ids}, not {tokens}")
            if update.finish_reason is None:
                continue
            known.end = update
            if update.finish_reason != "abort":
                is_whole = (known.token_ids, update.finish_reason) == (tokens, finish_reason)
                self.require(is_whole, "I3", f"{update} ends {known.token_ids}, not {tokens}")
            elif not known.was_aborted:
                is_stale = self.fault_at is not None and "stale" in str(update.error)
                # Without a token since then, the request may be the cause of these failures.
                has_many = self.num_failures - known.first_failure > MAX_FRUITLESS_RESTARTS
                has_cause = ((self.ends_with_fault or has_many) and bool(update.error)) or is_stale
                self.require(has_cause, "I3", f"nobody aborted, and there is no cause: {update}")
                is_late = not is_stale and self.world.now > self.latest_end()  # they are stale once others have loaded
                self.require(not is_late, "slow", f"fault at {self.fault_at}: {update}")

    @property
    def may_fail(self) -> bool:
        """True if calls may end with an error."""
        return self.ends_with_fault or len(self.victims) > MAX_FRUITLESS_RESTARTS

    @property
    def ends_with_fault(self) -> bool:
        """True if a fault has ended all requests, and the engine."""
        return self.fault_at is not None and self.scenario.on_failure == "end"

    def latest_end(self) -> float:
        """Return the time until which requests end after the fault."""
        assert self.fault_at is not None
        return self.fault_at + 5.0 + (2 * STEP_TIMEOUT_S + LOAD_TIMEOUT_S if self.is_silent else self.scenario.stall_s)

    @property
    def is_silent(self) -> bool:
        """True if the fault is noticed only when something has taken too long."""
        return self.fault_at is not None and self.scenario.fault in ("stop engine", "stop rank", "cut to", "cut from")

    def check_requests(self) -> None:
        unended = [request_id for request_id, known in self.sent.items() if known.end is None]
        self.require(not unended, "I3", f"requests never ended: {unended}")

    def check_idle(self) -> None:
        """Send one request for each replica: a router that knows of no load sends each to another one."""
        dice = self.world.dice
        # Steps in flight end, one of which may stall, with replicas that may be asleep.
        self.world.wait(lambda: False, 2 * HEARTBEAT_S + self.scenario.stall_s)
        engine = self.engine
        self.require(not engine.has_work, "I4", "an idle engine has work")
        # The last report may be larger than the pipe's buffer: the rest of it comes once its beginning has been read.
        for _ in range(3):
            before = list(engine.num_free_blocks)
            self.world.wait(lambda: False, HEARTBEAT_S)
        # After a silent fault, a step may still be in flight that has blocks of a request that ended.
        is_free = before == [NUM_BLOCKS] * len(before) or self.is_silent
        self.require(is_free, "I4", f"blocks are in use: {before} of {NUM_BLOCKS}")
        num_groups = self.num_groups
        for number in range(len(before)):
            request = Request(
                request_id=f"last {number}",
                prompt_token_ids=[dice.randrange(100) for _ in range(4)],
                params=RequestParams(max_tokens=16),
                seed=10**6,
                eos_token_ids=[END_TOKEN],
            )
            try:
                engine.add(request)
            except StaleWeightsError:  # the failure was noticed only now
                self.renew_weights()
                engine.add(request)
            self.sent[request.request_id] = _Sent(request, self.num_failures)
        least = list(engine.num_free_blocks)
        while engine.has_work:
            self.take_step()
            least = [min(pair) for pair in zip(least, engine.num_free_blocks, strict=True)]
        is_spread = max(least) < NUM_BLOCKS or self.num_groups > num_groups  # a silent fault is noticed only now
        self.require(is_spread, "I4", f"an idle engine sends all requests to some replicas: {least}")

    def require(self, holds: bool, invariant: str, message: str) -> None:
        if not holds:
            self.world.violation = InvariantViolation(invariant, f"at {self.world.now:.2f} s: {message}")
            raise self.world.violation

    def report(self) -> EngineReport:
        kinds = Counter(
            "error" if known.end and known.end.error else (known.end.finish_reason or "") if known.end else ""
            for known in self.sent.values()
        )
        return EngineReport(
            self.num_groups,
            self.num_left_out,
            len(self.victims),
            dict(sorted(kinds.items())),
            self.world.now,
            self.world.num_turns,
        )
