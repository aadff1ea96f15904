"""Ranks as actors of a Ray cluster: the only file that imports ray.

Ray places processes and watches them. Steps go to a replica's ranks through a compiled graph, or by plain calls;
tensors go between ranks as everywhere else, through `distributed/`. All that Ray carries is bytes that msgspec wrote.

Who talks with an actor does so over a channel, as with a child process: on each side ends a socket pair, and two
threads carry its bytes through calls of the actor. That these calls are answered is also the sign that the actor, its
node and the way there live.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import secrets
import select
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from moeserve.addresses import address_on, is_loopback
from moeserve.config.environment import ray_address, ray_temporary_folder
from moeserve.config.resolve import fit_whole
from moeserve.config.settings import EngineConfig
from moeserve.errors import DistributedError, EngineError, SettingsError
from moeserve.machine import installed_version
from moeserve.processes.channel import Channel
from moeserve.processes.failures import FailureReport, report_of
from moeserve.processes.supervision import SECONDS_TO_EXIT, WatchedProcess, collect_failures, end_all, send_failures
from moeserve.protocol import StepPlan, StepResult
from moeserve.scheduling.lockstep import Agreement
from moeserve.worker.protocol import RankStart, Step, rank_name

logger = logging.getLogger(__name__)

# An actor that has not answered for so long is taken for dead. Python in an actor may be held up by imports.
SECONDS_OF_SILENCE = 7.0
# An actor that nobody has asked for so long ends itself.
SECONDS_UNTIL_ORPHANED = 30.0
SECONDS_OF_A_PULL = 1.0
# For the processes of actors to come up, and for a reservation that the cluster could hold.
SECONDS_TO_START = 60.0
SECONDS_TO_RESERVE = 30.0
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_OF_SKEW = 10.0  # that clocks of nodes may differ
PIECE_BYTES = 2**20
PACKAGES = ("moeserve", "torch", "ray")  # whose versions must be equal on all nodes
MIN_VERSION = (2, 52)


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself."""

    node_id: str
    address: str  # by which Ray's nodes know it
    hostname: str
    python: str
    versions: dict[str, str]  # by package; "" where it is missing
    kernels: str  # the instruction set that its C++ kernels compute with; "": it has none
    time: float  # seconds since the epoch
    unreadable: str  # why the model cannot be read there; "": it can

    @property
    def name(self) -> str:
        return f"node {self.address} ({self.hostname})"


class _Outcome(msgspec.Struct, frozen=True):
    """What a rank answers to a step."""

    result: StepResult | None
    error: str = ""  # of a step that ran to its end, and has no result


@dataclass(frozen=True)
class Node:
    """A living node of the cluster."""

    node_id: str
    address: str
    cores: int
    gpus: int


@dataclass(frozen=True)
class Place:
    """Where one rank is to run."""

    group: PlacementGroup
    bundle: int
    node: Node


class RemoteProcess:
    """What runs in an actor: a channel to the process that made it, and a watch."""

    SAYS: ClassVar[Any] = None  # type of the messages that it sends, beside last words

    def __init__(self, name: str, log_level: int) -> None:
        self.name = name
        logging.basicConfig(level=log_level, format=f"%(levelname)s {name.replace('%', '%%')}: %(message)s")
        logging.getLogger("ray").setLevel(max(log_level, logging.WARNING))
        self._socket, self._tunnel = socket.socketpair()
        self._channel: Channel[Any] | None = None
        self._last_asked = time.monotonic()
        threading.Thread(target=self._end_as_orphan, name="watch-user", daemon=True).start()

    @ray.method(concurrency_group="tunnel")
    def push(self, data: bytes) -> None:
        """Bytes for this side of the channel. The caller waits for one call before the next."""
        self._tunnel.sendall(data)

    @ray.method(concurrency_group="tunnel")
    def pull(self) -> bytes:
        """Bytes of this side of the channel, if there are any soon. One call at a time."""
        self._last_asked = time.monotonic()
        poll = select.poll()
        poll.register(self._tunnel, select.POLLIN)
        return self._tunnel.recv(PIECE_BYTES) if poll.poll(SECONDS_OF_A_PULL * 1000) else b""

    def _channel_of(self, incoming: Any) -> Channel[Any]:
        """To be called once."""
        self._channel = Channel(self._socket, incoming)
        return self._channel

    @contextlib.contextmanager
    def _heard_out(self) -> Iterator[None]:
        """An error becomes last words, and one of Ray that carries nothing of it."""
        try:
            yield
        except BaseException as error:
            send_failures(self._channel or self._channel_of(None), [report_of(error, self.name)])
            raise RuntimeError(f"{self.name} has failed") from None

    def _leave(self) -> None:
        """Ends the actor, once what it said was pulled."""
        poll = select.poll()
        poll.register(self._tunnel, select.POLLIN)
        deadline = time.monotonic() + SECONDS_TO_EXIT
        while poll.poll(0) and time.monotonic() < deadline:
            time.sleep(0.01)
        ray.actor.exit_actor()

    def _end_as_orphan(self) -> None:
        while time.monotonic() - self._last_asked < SECONDS_UNTIL_ORPHANED:
            time.sleep(SECONDS_OF_A_PULL)
        os._exit(1)


class RankProcess(RemoteProcess):
    """One rank. Does nothing until it is started."""

    def __init__(self, name: str, log_level: int) -> None:
        super().__init__(name, log_level)
        self._store: Any = None
        self._worker: Any = None
        self._thread = threading.local()
        self._num_threads = 1

    def facts(self, model: str) -> bytes:
        """`NodeFacts` of the node where this is."""
        with self._heard_out():
            return _encoded_facts(model)

    def open_store(self, interface: str | None, address: str) -> bytes:
        """Opens the store where ranks meet, on an address that other nodes can reach. Returns where: (host, port)."""
        with self._heard_out():
            from moeserve.distributed.store import start_store

            host = address_on(interface) if interface else address
            self._store = start_store(host)
            return msgspec.msgpack.encode((host, self._store.port))

    def start(self, data: bytes, *, show_progress: bool) -> int:
        """Meets the other ranks and loads the model. Returns the blocks of KV cache that each rank has."""
        with self._heard_out():
            from moeserve.worker.process import join  # brings torch: only now, when this process is watched
            from moeserve.worker.worker import Worker

            start = msgspec.msgpack.decode(data, type=RankStart)
            self._num_threads = start.config.num_threads
            self._worker = Worker(start.config, join(start), show_progress=show_progress)
            return int(self._worker.num_blocks)

    def execute(self, data: bytes) -> bytes:
        """Runs one step. The answer says what was sampled, on the rank that samples."""
        with self._heard_out():
            from moeserve.ops.threads import set_num_threads

            if not hasattr(self._thread, "is_set"):  # torch counts for each thread that calls it
                set_num_threads(self._num_threads)
                self._thread.is_set = True
            step = msgspec.msgpack.decode(data, type=Step)
            try:
                outcome = _Outcome(self._worker.execute(step.plan, step.agreement))
            except DistributedError:
                raise
            except EngineError as error:  # found after every rank had done its part of the step
                outcome = _Outcome(None, str(error))
            return msgspec.msgpack.encode(outcome)


class ActorHandle:
    """A process in an actor. See `ProcessHandle`."""

    def __init__(self, actor: Any, name: str, tunnel: socket.socket) -> None:
        """
        Args:
            tunnel: the other end of the channel; its bytes travel in calls of the actor.
        """
        self.actor = actor
        self._tunnel = tunnel
        self._cause = ""
        self._gone = threading.Event()
        self._news_of_death = os.eventfd(0)
        self._lock = threading.Lock()  # of what `close` closes
        self._is_closed = False
        for work in (self._pull, self._push):
            threading.Thread(target=work, name=f"{work.__name__} {name}", daemon=True).start()

    @property
    def watched_fds(self) -> list[int]:
        return [self._news_of_death]

    def exit_cause(self) -> str | None:
        return self._cause if self._gone.is_set() else None

    def kill(self) -> None:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self.actor)

    def wait(self, timeout_s: float) -> bool:
        return self._gone.wait(max(0.0, timeout_s))

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._news_of_death)
                self._tunnel.shutdown(socket.SHUT_RDWR)

    def _pull(self) -> None:
        """Carries what the actor says, until it has died."""
        patience_s = SECONDS_TO_START
        unread = bytearray()  # what our side does not take yet: to wait for it would look like death to the actor
        try:
            while not self._is_closed:
                reference = self.actor.pull.remote()
                try:
                    unread += ray.get(reference, timeout=patience_s)
                except GetTimeoutError:  # or this process itself was stopped for a while
                    unread += ray.get(reference, timeout=SECONDS_OF_A_PULL)
                patience_s = SECONDS_OF_SILENCE
                with contextlib.suppress(BlockingIOError):
                    while unread:
                        del unread[: self._tunnel.send(memoryview(unread)[:PIECE_BYTES], socket.MSG_DONTWAIT)]
        except GetTimeoutError:
            self._cause = f"nothing was heard of it for {patience_s:g} s: it hangs, or its node is gone, or the way"
        except RayActorError as error:
            self._cause = _cause_of(error)
        except OSError as error:  # closed here
            self._cause = str(error)
        except Exception as error:  # whatever it is, nobody hears this actor any more
            self._cause = f"it cannot be reached through Ray any more ({type(error).__name__}: {_first_line(error)})"
        finally:
            with self._lock:
                self._gone.set()
                if not self._is_closed:
                    os.eventfd_write(self._news_of_death, 1)

    def _push(self) -> None:
        """Carries what is said to the actor."""
        with contextlib.suppress(Exception):  # `_pull` finds out as well, and says why
            while data := self._tunnel.recv(PIECE_BYTES):
                ray.get(self.actor.push.remote(data))


class PendingStep:
    """A step that is under way."""

    def __init__(self, references: Sequence[Any], name: str, step: int, timeout_s: float) -> None:
        self._references = references
        self._name = name
        self._step = step
        self._timeout_s = timeout_s

    def result(self) -> StepResult:
        """What was sampled, once all ranks have done the step.

        Raises:
            EngineError: there is nothing to choose from. Every rank has done its part.
            DistributedError: a rank has failed; or they did not answer in time.
        """
        try:
            answers = ray.get(list(self._references), timeout=self._timeout_s)
        except Exception as error:  # Ray's own, of many kinds
            raise DistributedError(
                f"{self._name}: step {self._step} was not done by all ranks of the replica ({_first_line(error)})"
            ) from None
        outcome = msgspec.msgpack.decode(answers[0], type=_Outcome)
        if outcome.result is None:
            raise EngineError(outcome.error)
        return outcome.result


class RayExecutor:
    """See `Executor`. Runs in a process of its own, which computes nothing."""

    def __init__(self, starts: Sequence[RankStart], ranks: Sequence[Any], *, show_progress: bool) -> None:
        """
        Args:
            starts, ranks: of the replica's ranks by tp, and the actors in which they are.
        """
        config = starts[0].config
        self.name = rank_name(config, starts[0].rank)
        self._ranks = ranks
        self._timeout_s = config.collective_timeout + SECONDS_OF_SILENCE  # ranks know better what they wait for
        encoded = [msgspec.msgpack.encode(start) for start in starts]
        loading = [
            rank.start.remote(data, show_progress=show_progress and start.rank == 0)
            for rank, data, start in zip(ranks, encoded, starts, strict=True)
        ]
        try:
            self.num_blocks = int(ray.get(loading)[0])
        except RayError as error:
            raise DistributedError(f"{self.name}: a rank of the replica did not start ({_first_line(error)})") from None
        self._graph = _compiled(ranks, self._timeout_s) if config.ray_compiled_graph else None

    def submit(self, plan: StepPlan | None, agreement: Agreement) -> PendingStep:
        """Sends a step to all ranks and does not wait for them. Steps are done in the order in which they are sent."""
        order = msgspec.msgpack.encode(Step(plan=plan, agreement=agreement))
        if self._graph is not None:
            try:
                references = self._graph.execute(order)
            except Exception as error:  # Ray's own, of many kinds
                raise DistributedError(
                    f"{self.name}: step {agreement.step} could not be sent ({_first_line(error)})"
                ) from None
        else:
            references = [rank.execute.remote(order) for rank in self._ranks]
        return PendingStep(references, self.name, agreement.step, self._timeout_s)

    def execute(self, plan: StepPlan | None, agreement: Agreement) -> StepResult:
        return self.submit(plan, agreement).result()

    def shutdown(self) -> None:
        if self._graph is not None:
            self._graph.teardown()
            self._graph = None


def _compiled(ranks: Sequence[Any], timeout_s: float) -> Any:
    """A graph of one step: its order to all ranks, and all their answers. None: Ray has none for these actors."""
    try:
        from ray.dag import InputNode, MultiOutputNode
        from ray.dag.context import DAGContext

        context = DAGContext.get_current()
        context.submit_timeout = context.get_timeout = int(timeout_s)
        with InputNode() as order:
            outputs = MultiOutputNode([rank.execute.bind(order) for rank in ranks])
        return outputs.experimental_compile()
    except Exception as error:  # whatever keeps Ray from it, plain calls do the same
        logger.warning("Ray compiles no graph here (%s): steps go by plain calls", _first_line(error))
        return None


class Cluster:
    """The Ray cluster that this process uses: one that runs, or one of this host alone.

    The latter is started for the first of these objects, and ends when the last one is closed.
    """

    _num_open = 0  # of those that use a cluster which was started here
    _lock = threading.Lock()

    def __init__(self, *, may_start: bool = True) -> None:
        """
        Args:
            may_start: where no cluster runs, one is started on this host.

        Raises:
            EngineError: there is none, or it cannot be used.
        """
        _require_version()
        self._is_ours = False
        with Cluster._lock:
            self._connect(may_start)
            Cluster._num_open += self._is_ours

    def _connect(self, may_start: bool) -> None:
        if ray.is_initialized():
            self._is_ours = Cluster._num_open > 0
            return
        address = _running_cluster()
        if not address and not may_start:
            raise EngineError("no Ray cluster was found: start one with `moeserve launch` or `ray start`")
        options: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
        try:
            ray.init(logging_level=logging.ERROR, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EngineError(
                f"the Ray cluster{f' at {address}' if address else ''} cannot be used: {error}. If it was started with "
                "a token, set RAY_AUTH_MODE=token here"
            ) from None
        self._is_ours = not address

    def nodes(self) -> list[Node]:
        """Those that live, this one first and then by address."""
        own = ray.get_runtime_context().get_node_id()
        nodes = [
            Node(
                node_id=each["NodeID"],
                address=each["NodeManagerAddress"],
                cores=int(each["Resources"].get("CPU", 0)),
                gpus=int(each["Resources"].get("GPU", 0)),
            )
            for each in ray.nodes()
            if each["Alive"]
        ]
        return sorted(nodes, key=lambda node: (node.node_id != own, node.address))

    def wait_for_nodes(self, count: int, timeout_s: float) -> None:
        """Returns when so many live.

        Raises:
            EngineError: they do not come in time; those that have are named.
        """
        deadline = time.monotonic() + timeout_s
        while len(nodes := self.nodes()) < count:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{len(nodes)} of {count} nodes came within {timeout_s:g} s: "
                    f"{', '.join(node.address for node in nodes)}; see what `moeserve launch` said on the others"
                )
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def check(self, model: str | None) -> list[NodeFacts]:
        """Asks all nodes that live what a rank there would find.

        Raises:
            SettingsError: a node differs from this one, or cannot read the model: all such nodes are named.
            EngineError: a node does not answer.
        """
        asking = ray.remote(num_cpus=0, max_retries=0)(_encoded_facts)
        asked = {
            node: asking.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False)
            ).remote(model)
            for node in self.nodes()
        }
        earliest = time.time()
        found = []
        deadline = time.monotonic() + SECONDS_TO_START
        for node, reference in asked.items():
            try:
                answer = ray.get(reference, timeout=max(0.1, deadline - time.monotonic()))
            except RayError as error:
                raise EngineError(f"node {node.address} cannot run a rank: {_first_line(error)}") from None
            found.append(msgspec.msgpack.decode(answer, type=NodeFacts))
        _refuse_unlike(found, _own_facts(model), earliest)
        _warn_of_kernels(found)
        return found

    def close(self) -> None:
        """May be called twice."""
        with Cluster._lock:
            if self._is_ours:
                self._is_ours = False
                Cluster._num_open -= 1
                if Cluster._num_open == 0 and ray.is_initialized():
                    ray.shutdown()


class RayWorkerGroup:
    """See `WorkerGroup`: an actor for each rank, and one for the engine of each replica, which computes nothing."""

    def __init__(
        self, config: EngineConfig, cluster: Cluster, engine_process: type[RemoteProcess], *, show_progress: bool
    ) -> None:
        """Returns when all were told to load the model.

        Args:
            engine_process: has a method `serve(starts: list[bytes], ranks, show_progress)`.

        Raises:
            SettingsError: the nodes differ, or cannot read the model.
            EngineError: the cluster has no room, or a node fails.
        """
        self._owner = os.getpid()
        self._groups: list[PlacementGroup] = []
        self.engines: list[WatchedProcess[Any]] = []
        self._ranks: list[WatchedProcess[Any]] = []
        if not ray.is_initialized():  # Ray would start another cluster at the next call
            raise EngineError("Ray was shut down in this process; make a new LLM")
        try:
            places = self._reserve(config, cluster)
            self._start_actors(config, places, engine_process)
            self._check_nodes(config.model_path, places)
            _warn_of_split(places, config.tensor_parallel_size)
            _tell_layout(config, places, show_progress)
            self._load(config, places, show_progress)
        except BaseException:
            self.end()
            raise

    @property
    def members(self) -> list[WatchedProcess[Any]]:
        return [*self._ranks, *self.engines]

    def collect_failures(self) -> list[FailureReport]:
        """Of a node that is gone its ranks are silent, while the others complain of them at once."""
        return collect_failures(self.members, seconds=SECONDS_OF_SILENCE + SECONDS_OF_A_PULL)

    def end(self, patience_s: float = 0.0) -> None:
        if os.getpid() == self._owner and ray.is_initialized():  # a fork of its owner leaves it alone
            end_all(self.engines, patience_s=patience_s)
            end_all(self._ranks)
            for group in self._groups:
                with contextlib.suppress(RayError):
                    remove_placement_group(group)
        self._groups = []

    def _reserve(self, config: EngineConfig, cluster: Cluster) -> list[Place]:
        """A place for each rank, by rank: this node's come first, then by address; within a node by bundle."""
        tp = config.tensor_parallel_size
        bundle = {"CPU": float(config.num_threads)} | ({"GPU": 1.0} if config.device == "cuda" else {})
        nodes = cluster.nodes()
        if (adopted := get_current_placement_group()) is not None:
            places = _places_in(adopted, bundle, nodes)
            if len(places) < config.num_ranks:
                raise SettingsError(
                    f"the placement group that this process is in has {len(places)} bundles with {_shown(bundle)}, but "
                    f"there are {config.num_ranks} ranks; make it larger, or leave it"
                )
            return _whole_first(places, tp)[: config.num_ranks]
        cores = [node.cores for node in nodes]
        strategy = "STRICT_PACK" if fit_whole(cores, config.num_threads, tp, config.data_parallel_size) else "PACK"
        for _ in range(config.data_parallel_size):
            name = f"moeserve-{secrets.token_hex(4)}"
            self._groups.append(placement_group([bundle] * tp, strategy=strategy, name=name))
        deadline = time.monotonic() + SECONDS_TO_RESERVE
        replicas = []
        for group in self._groups:
            if not group.wait(max(0.1, deadline - time.monotonic())):
                raise EngineError(
                    f"the Ray cluster has no room now for {config.data_parallel_size} times {tp} ranks with "
                    f"{_shown(bundle)} each: free are {_shown(ray.available_resources())} of "
                    f"{_shown(ray.cluster_resources())}; end what uses them, or ask for less"
                )
            replicas.append(_places_in(group, bundle, nodes))
        replicas.sort(key=lambda places: [_rank_of_node(place.node, nodes) for place in places])
        return [place for places in replicas for place in places]

    def _start_actors(self, config: EngineConfig, places: Sequence[Place], engine_process: type[RemoteProcess]) -> None:
        per_node = Counter(place.node for place in places)
        for rank, place in enumerate(places):
            resources = {
                "num_cpus": config.num_threads,
                "num_gpus": int(config.device == "cuda"),
                # Threads that wait awake would take the cores from those that work.
                "runtime_env": {"env_vars": {"OMP_WAIT_POLICY": "passive"}}
                if per_node[place.node] * config.num_threads >= place.node.cores
                else {},
            }
            name = f"{rank_name(config, rank)} on node {place.node.address}"
            self._ranks.append(_start_actor(RankProcess, name, place, resources))
        for replica, place in enumerate(places[:: config.tensor_parallel_size]):
            name = f"engine of replica {replica} on node {place.node.address}"
            self.engines.append(_start_actor(engine_process, name, place, {"num_cpus": 0}))

    def _check_nodes(self, model: str, places: Sequence[Place]) -> None:
        """Asks a rank of each node what it finds there."""
        rank_of = {place.node: rank for rank, place in zip(self._ranks, places, strict=True)}
        earliest = time.time()
        asked = [(rank, _actor(rank).facts.remote(model)) for rank in rank_of.values()]
        found = [msgspec.msgpack.decode(self._answer(rank, reference), type=NodeFacts) for rank, reference in asked]
        _refuse_unlike(found, _own_facts(model), earliest)
        _warn_of_kernels(found)

    def _load(self, config: EngineConfig, places: Sequence[Place], show_progress: bool) -> None:
        """Tells the engines to have their ranks meet and load the model."""
        first = places[0].node
        opening = _actor(self._ranks[0]).open_store.remote(config.network_interface, first.address)
        host, port = msgspec.msgpack.decode(self._answer(self._ranks[0], opening), type=tuple[str, int])
        if is_loopback(host) and len({place.node for place in places}) > 1:
            raise SettingsError(
                f"ranks would meet at {host} on node {first.address}, which other nodes cannot reach; start Ray there "
                "with --node-ip-address, or set network_interface"
            )
        key = secrets.token_hex(16)
        starts = [
            msgspec.msgpack.encode(RankStart(config=config, rank=rank, store_host=host, store_port=port, store_key=key))
            for rank in range(config.num_ranks)
        ]
        tp = config.tensor_parallel_size
        for replica, engine in enumerate(self.engines):
            own = slice(replica * tp, replica * tp + tp)
            _actor(engine).serve.remote(starts[own], [_actor(rank) for rank in self._ranks[own]], show_progress)

    def _answer(self, process: WatchedProcess[Any], reference: Any) -> Any:
        """To a call of an actor that may still be starting."""
        try:
            return ray.get(reference, timeout=SECONDS_TO_START)
        except RayError as error:
            found = process.failures()
            why = found[0] if found else _first_line(error)
            raise EngineError(f"{process.name} did not start within {SECONDS_TO_START:g} s: {why}") from None


def _running_cluster() -> str:
    """The address of the cluster that this process was told of, or that was started on this host; "": there is none.

    Ray itself would wait a minute for one that has gone, and then end the process.

    Raises:
        EngineError: the one it was told of does not answer.
    """
    told = ray_address()
    if told in ("auto", "local"):
        told = ""
    if told.startswith("ray://"):
        raise EngineError(f"RAY_ADDRESS={told}: a Ray client cannot run an engine; start the program on a node")
    address = told
    if not told:
        with contextlib.suppress(OSError):
            folder = ray_temporary_folder() or tempfile.gettempdir()
            address = (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()
    if not address:
        return ""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=SECONDS_OF_SILENCE).close()
    except (OSError, ValueError) as error:
        if told:
            raise EngineError(f"RAY_ADDRESS={told}: no Ray cluster answers there ({error})") from None
        return ""
    return address


def _start_actor(kind: type[RemoteProcess], name: str, place: Place, resources: dict[str, Any]) -> WatchedProcess[Any]:
    actor_class: Any = ray.remote(concurrency_groups={"tunnel": 3}, max_restarts=0, max_task_retries=0)(kind)
    actor = actor_class.options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=place.group, placement_group_bundle_index=place.bundle
        ),
        **resources,
    ).remote(name, logging.getLogger("moeserve").getEffectiveLevel())
    ours, tunnel = socket.socketpair()
    return WatchedProcess(name, ours, kind.SAYS, ActorHandle(actor, name, tunnel))


def _actor(process: WatchedProcess[Any]) -> Any:
    assert isinstance(process.handle, ActorHandle)
    return process.handle.actor


def _places_in(group: PlacementGroup, least: dict[str, float], nodes: Sequence[Node]) -> list[Place]:
    """The bundles of a group that have what a rank needs, in order of nodes, those that have died meanwhile last."""
    node_of = {node.node_id: node for node in nodes}
    ids = placement_group_table(group)["bundles_to_node_id"]
    places = [
        Place(group, index, node_of.get(ids[index]) or Node(ids[index], "?", cores=0, gpus=0))
        for index, bundle in enumerate(group.bundle_specs)
        if all(bundle.get(resource, 0) >= amount for resource, amount in least.items())
    ]
    return sorted(places, key=lambda place: (_rank_of_node(place.node, nodes), place.bundle))


def _rank_of_node(node: Node, nodes: Sequence[Node]) -> int:
    return nodes.index(node) if node in nodes else len(nodes)


def _whole_first(places: Sequence[Place], tp: int) -> list[Place]:
    """In order of nodes, but so that as many replicas as possible have all their ranks on one."""
    of_node: dict[Node, list[Place]] = {}
    for place in places:
        of_node.setdefault(place.node, []).append(place)
    whole = [place for each in of_node.values() for place in each[: len(each) // tp * tp]]
    return whole + [place for each in of_node.values() for place in each[len(each) // tp * tp :]]


def _warn_of_split(places: Sequence[Place], tp: int) -> None:
    """Of replicas whose ranks are on several nodes."""
    nodes = [place.node for place in places]
    split = [start // tp for start in range(0, len(places), tp) if len({*nodes[start : start + tp]}) > 1]
    if split:
        logger.warning(
            "the ranks of replica %s are on several nodes: in each layer rows cross the network twice more",
            ", ".join(map(str, split)),
        )


def _tell_layout(config: EngineConfig, places: Sequence[Place], show_progress: bool) -> None:
    """Which rank is where, for people: before anything is loaded."""
    lines = [f"{'rank':>4}  replica  tp  node"]
    for rank, place in enumerate(places):
        replica, tp = divmod(rank, config.tensor_parallel_size)
        device = "1 GPU" if config.device == "cuda" else f"{config.num_threads} thread{'s' * (config.num_threads > 1)}"
        lines.append(f"{rank:>4}  {replica:>7}  {tp:>2}  {place.node.address}  {device}")
    if show_progress:
        print("\n".join(lines), file=sys.stderr, flush=True)
    else:
        logger.info("ranks:\n%s", "\n".join(lines))


def _encoded_facts(model: str | None) -> bytes:
    return msgspec.msgpack.encode(_own_facts(model))


def _own_facts(model: str | None) -> NodeFacts:
    return NodeFacts(
        node_id=ray.get_runtime_context().get_node_id(),
        address=ray.util.get_node_ip_address(),
        hostname=socket.gethostname(),
        python=platform.python_version(),
        versions={package: installed_version(package) for package in PACKAGES},
        kernels=_own_kernels(),
        time=time.time(),
        unreadable=why_unreadable(Path(model)) if model else "",
    )


def _own_kernels() -> str:
    try:
        from moeserve.ops.cpu.native import native_kernels  # brings torch, which may be missing here
    except ImportError:
        return ""
    kernels = native_kernels()
    return kernels.isa() if kernels else ""


def why_unreadable(model: Path) -> str:
    """Of a checkpoint's files, on this node; "": they can be read."""
    try:
        (model / "config.json").open("rb").close()
        for shard in model.glob("*.safetensors"):
            shard.open("rb").close()
    except OSError as error:
        return str(error)
    return ""


def _refuse_unlike(found: Sequence[NodeFacts], own: NodeFacts, earliest: float) -> None:
    """Raises SettingsError. They were asked at `earliest` by this node's clock, and have answered by `own.time`."""
    faults = []
    for node in found:
        for what, theirs, ours in [
            ("Python", node.python, own.python),
            *((package, node.versions[package], own.versions[package]) for package in PACKAGES),
        ]:
            if theirs != ours:
                faults.append(f"{node.name} has {what} {theirs or 'not at all'}, but {own.name} has {ours or 'not'}")
        if node.unreadable:
            faults.append(f"{node.name} cannot read the model: {node.unreadable}")
        skew = min(0.0, node.time - earliest) + max(0.0, node.time - own.time)
        if abs(skew) > SECONDS_OF_SKEW:
            faults.append(f"the clock of {node.name} differs from that of {own.name} by {skew:+.0f} s or more")
    if faults:
        raise SettingsError("the nodes of the Ray cluster cannot run one engine: " + "; ".join(faults))


def _warn_of_kernels(found: Sequence[NodeFacts]) -> None:
    """Of nodes whose kernels compute with different instruction sets: all are right, but not to the same bits."""
    if len({node.kernels for node in found}) > 1:
        logger.warning(
            "the nodes do not compute alike (%s): results may depend in their last bits on the node",
            ", ".join(f"{node.name}: {node.kernels or 'no C++ kernels'}" for node in found),
        )


def _require_version() -> None:
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < MIN_VERSION:
        raise EngineError(
            f"Ray {ray.__version__} is too old: moeserve needs {'.'.join(map(str, MIN_VERSION))} or newer"
        )


def _cause_of(error: RayError) -> str:
    """One line of what Ray says of an actor that has died."""
    text = str(error)
    if "its node has died" in text or "node was terminated" in text:
        return "its node has died"
    if isinstance(error, RayActorError) and "connection error code" in text:  # what a raylet sees of a kill
        return "its process was killed, or has crashed"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    """What people read of an error: of one that was raised elsewhere, what it was there."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if isinstance(error, RayTaskError) else lines[0]


def _shown(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if name in ("CPU", "GPU")) or "nothing"
