"""The process of one worker rank, which joins the other ranks, builds the worker, and executes rounds."""

from __future__ import annotations

import logging
import time

import torch

from moeserve.config.allocation import refusing_what_cannot_be_allocated
from moeserve.config.engine_config import EngineConfig
from moeserve.config.resolve_parallel import too_few_gpus
from moeserve.distributed.connect import Rendezvous, connect
from moeserve.distributed.groups import Groups
from moeserve.errors import SettingsError
from moeserve.numa import bind_thread, nodes_of_rank, usable_nodes
from moeserve.processes import progress_records
from moeserve.processes.child import Parent
from moeserve.processes.progress_records import Phase, set_phase
from moeserve.scheduling.lockstep import Round
from moeserve.worker.protocol import Leave, RankStart, ToRank, mesh_of
from moeserve.worker.worker import PendingRound, Worker

logger = logging.getLogger(__name__)

SECONDS_TO_MEET = 300.0  # until all ranks have joined
SECONDS_BETWEEN_LOOKS = 2e-4  # interval between checks if a GPU has finished the only round


def run(parent: Parent) -> None:
    """Execute the rounds that the engine process sends, until it sends `Leave`."""
    start = parent.config(RankStart)
    progress_records.attach(parent.records_fd, start.rank)
    channel = parent.channel(ToRank)
    groups = join(start)
    with refusing_what_cannot_be_allocated(start.config):
        worker = Worker(start.config, groups, show_progress=start.show_progress)
    channel.send(worker.facts)
    transfers = worker.start_transfers(channel.send)
    has_ended = False  # True after an agreement to stop: no rank runs later rounds
    running: PendingRound | None = None  # a round on a GPU whose result has not been sent

    def finish() -> None:
        nonlocal running
        if running is not None:
            result, running = running.finish(), None  # on every rank, so that its table has the tokens
            if start.answers:
                channel.send(result)

    def finish_if_done() -> None:
        if running is not None and running.is_done:
            finish()

    set_phase(Phase.IDLE)
    worker.runner.step_runner.on_layers = finish_if_done  # called before the long part of a step
    while True:
        for message in channel.receive(None if running is None else 0.0):
            if isinstance(message, Leave):
                finish()
                return
            if has_ended:
                continue
            if not isinstance(message, Round):
                transfers.submit(message)
                continue
            set_phase(Phase.COMPUTING)
            started = worker.start(message)  # while a GPU computes the previous round
            finish()
            running = started
            finish_if_done()
            set_phase(Phase.IDLE)
            has_ended = started.agreement.ends_all
            if has_ended:
                finish()
                worker.close()  # collective: all ranks
        if running is not None:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            finish_if_done()


def join(start: RankStart) -> Groups:
    """Return the groups of this rank once all ranks have joined.

    The rank's GPU, if any, becomes this thread's current device. A rank on the CPU is bound to its NUMA nodes after it
    has compared the host's cores with the number of ranks, and before it starts other threads.
    """
    config = start.config
    device = take_device(config, start.rank)
    groups = connect(
        mesh_of(config),
        start.rank,
        Rendezvous(start.store, config.failure.collective_timeout, seconds_to_meet=SECONDS_TO_MEET),
        check_order=config.failure.debug_collectives,
        device=device,
    )
    take_nodes(config, start.rank)
    return groups


def take_nodes(config: EngineConfig, rank: int) -> None:
    """Bind this thread, and those that it starts, to the NUMA nodes of the rank, if the host has several."""
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
