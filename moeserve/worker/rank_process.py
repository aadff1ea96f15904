"""The process of one worker rank, which joins the other ranks, builds the worker, and executes rounds."""

from __future__ import annotations

import logging
import time

import msgspec
import torch

from moeserve.config.allocation import refusing_what_cannot_be_allocated
from moeserve.config.engine_config import EngineConfig
from moeserve.config.resolve_parallel import too_few_gpus
from moeserve.distributed.connect import Rendezvous, connect
from moeserve.distributed.groups import Groups
from moeserve.distributed.store import WAIT_FOR_REPORTS_S
from moeserve.errors import DistributedError, SettingsError
from moeserve.numa import bind_thread, nodes_of_rank, usable_nodes
from moeserve.processes import progress_records
from moeserve.processes.channel import Channel
from moeserve.processes.child import Parent
from moeserve.processes.failures import report_of
from moeserve.processes.progress_records import Phase, set_phase
from moeserve.scheduling.lockstep import Round
from moeserve.worker.protocol import Faulted, Leave, RankStart, Rejoin, ToRank, mesh_of
from moeserve.worker.worker import PendingRound, Worker

logger = logging.getLogger(__name__)

SECONDS_TO_MEET = 300.0  # maximum time until all ranks have joined
SECONDS_BETWEEN_LOOKS = 2e-4  # interval between checks if a GPU has finished the only round


def run(parent: Parent) -> None:
    """Execute the rounds that the engine process sends, until it sends `Leave`."""
    start = parent.config(RankStart)
    progress_records.attach(parent.records_fd, start.record)
    progress_records.begin_epoch(start.epoch)
    channel = parent.channel(ToRank)
    groups = join(start)
    with refusing_what_cannot_be_allocated(start.config):
        worker = Worker(
            start.config,
            groups,
            show_progress=start.show_progress,
            num_blocks=start.num_blocks,
            chunk_size=start.chunk_size,
        )
    RankLoop(parent.name, start, worker, channel).run()


class RankLoop:
    """The loop of a rank that has loaded the model."""

    def __init__(self, name: str, start: RankStart, worker: Worker, channel: Channel[ToRank]) -> None:
        self._name, self._start, self._worker, self._channel = name, start, worker, channel
        self._epoch = start.epoch
        self._is_out_of_step = False  # after an agreement to stop, or a failure of another rank: no round is run
        self._running: PendingRound | None = None  # a round on a GPU whose result has not been sent

    def run(self) -> None:
        """Handle the messages of the engine process until `Leave`."""
        self._begin()
        while True:
            for message in self._channel.receive(None if self._running is None else 0.0):
                if isinstance(message, Leave):
                    self._finish()
                    return
                if isinstance(message, Rejoin):
                    self._rejoin(message.start)
                elif self._is_out_of_step:
                    continue
                elif isinstance(message, Round):
                    self._run_round(message)
                else:
                    self._transfers.submit(message)
            if self._running is not None:
                time.sleep(SECONDS_BETWEEN_LOOKS)
                self._finish_if_done()

    def _begin(self) -> None:
        self._is_out_of_step = False
        self._transfers = self._worker.start_transfers(self._channel.send)
        self._channel.send(msgspec.structs.replace(self._worker.facts, epoch=self._epoch))
        self._worker.runner.step_runner.on_layers = self._finish_if_done  # called before the long part of a step
        set_phase(Phase.IDLE)

    def _run_round(self, message: Round) -> None:
        set_phase(Phase.COMPUTING)
        try:
            started = self._worker.start(message)  # while a GPU computes the previous round
            self._finish()
            self._running = started
            self._finish_if_done()
            if started.agreement.ends_all:
                self._is_out_of_step = True
                self._finish()
                self._worker.close()  # collective: all ranks
        except DistributedError as error:
            if not self._start.config.recovers_in_place:
                raise
            self._leave(error)
        set_phase(Phase.IDLE)

    def _finish(self) -> None:
        if self._running is not None:
            result, self._running = self._running.finish(), None  # on every rank, so that its table has the tokens
            if self._start.answers:
                self._channel.send(result)

    def _finish_if_done(self) -> None:
        if self._running is not None and self._running.is_done:
            self._finish()

    def _rejoin(self, start: RankStart) -> None:
        self._epoch = start.epoch
        try:
            self._worker = rejoin(self._worker, start)
            self._start = start
        except (RuntimeError, OSError) as error:  # another rank has failed, or this recovery was abandoned
            self._leave(DistributedError(str(error)))
        else:
            self._begin()

    def _leave(self, error: DistributedError) -> None:
        """Leave all groups, and wait for `Rejoin`."""
        self._is_out_of_step, self._running = True, None
        self._channel.send(Faulted(self._epoch, report_of(error, self._name)))
        self._worker.groups.leave(str(error))  # others that wait for this rank fail at once


def rejoin(worker: Worker, start: RankStart) -> Worker:
    """Drop all connections and requests of a worker, and connect it in another epoch. Collective: all ranks.

    Returns:
        The worker, or if there are fewer replicas a new worker with the same weights and caches.
    """
    set_phase(Phase.LOADING)
    progress_records.begin_epoch(start.epoch)
    worker.groups.leave("this rank connects again, because another one was replaced")
    groups = connected(start)
    try:
        if groups.mesh != worker.groups.mesh:
            worker.drop_steps()
            return Worker(
                start.config,
                groups,
                show_progress=False,
                num_blocks=start.num_blocks,
                chunk_size=start.chunk_size,
                before=worker,
            )
        worker.rejoin(groups)
        return worker
    except BaseException:
        groups.leave("this rank could not connect again")
        raise


def join(start: RankStart) -> Groups:
    """Return the groups of this rank once all ranks have joined.

    The rank's GPU, if any, becomes this thread's current device. A rank on the CPU is bound to its NUMA nodes after it
    has compared the host's cores with the number of ranks, and before it starts other threads.
    """
    groups = connected(start)
    take_nodes(start.config, start.rank)
    return groups


def connected(start: RankStart) -> Groups:
    """Return connected groups of a rank. Collective: all ranks of the epoch."""
    failure = start.config.failure
    scope = f"epoch/{start.epoch}" if start.epoch else ""
    return connect(
        mesh_of(start.config),
        start.rank,
        Rendezvous(
            start.store,
            failure.collective_timeout,
            scope,
            seconds_to_meet=SECONDS_TO_MEET,
            # A failure that is recovered from needs no complete report.
            seconds_for_reports=0.0 if start.config.recovers_in_place else WAIT_FOR_REPORTS_S,
        ),
        check_order=failure.debug_collectives,
        device=take_device(start.config, start.rank),
    )


def take_nodes(config: EngineConfig, rank: int) -> None:
    """Bind this thread, and the threads that it starts, to the NUMA nodes of the rank, if the host has several."""
    hosts_nodes = usable_nodes() if config.compute.numa_binding else []
    nodes = nodes_of_rank(hosts_nodes, rank, config.parallel.num_ranks, config.compute.num_threads)
    if not nodes:
        if rank == 0 and len(hosts_nodes) > 1 and config.parallel.num_ranks > 1:
            logger.warning(
                "%d ranks with num_threads=%d do not fit on NUMA nodes of %s cores, so they are not bound to nodes; "
                "lower num_threads, or set numa_binding=False",
                config.parallel.num_ranks,
                config.compute.num_threads,
                ", ".join(str(len(node.cores)) for node in hosts_nodes),
            )
        return
    numbers = ", ".join(str(node.number) for node in nodes)
    try:
        bind_thread(nodes)
    except OSError as error:  # some containers do not permit it
        logger.warning(
            "rank %d is not bound to NUMA node %s, which may cost speed: %s; numa_binding=False does not try it",
            rank,
            numbers,
            error,
        )
    else:
        logger.info("rank %d is bound to NUMA node %s", rank, numbers)


def take_device(config: EngineConfig, rank: int) -> torch.device:
    """Return the device of a rank's tensors. A GPU becomes this thread's current device, which torch uses for "cuda".

    GPUs are numbered as in torch, which respects CUDA_VISIBLE_DEVICES. Each rank on a host has its own GPU; with Ray,
    an actor sees only its own GPU.

    Raises:
        SettingsError: there are fewer GPUs than ranks.
    """
    if config.compute.device == "cpu":
        return torch.device("cpu")
    index = 0 if config.parallel.executor == "ray" else rank
    num_gpus = torch.cuda.device_count()
    if index >= num_gpus:
        raise SettingsError(too_few_gpus(config.parallel, num_gpus))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
