"""The process of one worker rank: joins the others, builds the worker, executes the rounds that it receives."""

from __future__ import annotations

import torch

from moeserve.config.resolve import too_few_gpus
from moeserve.config.settings import EngineConfig
from moeserve.distributed.connect import Rendezvous, connect
from moeserve.distributed.groups import Groups
from moeserve.errors import SettingsError
from moeserve.processes.child import Parent
from moeserve.worker.protocol import Leave, Loaded, RankStart, ToRank, mesh_of
from moeserve.worker.worker import Worker


def run(parent: Parent) -> None:
    """Execute the rounds that the engine process sends, until it sends `Leave`."""
    start = parent.config(RankStart)
    channel = parent.channel(ToRank)
    worker = Worker(start.config, join(start), show_progress=start.show_progress)
    channel.send(Loaded(worker.num_blocks))
    has_ended = False  # by agreement: later rounds are not run on any rank
    while True:
        for message in channel.receive(None):
            if isinstance(message, Leave):
                return
            if has_ended:
                continue
            outcome = worker.execute(message)
            if start.answers:
                channel.send(outcome)
            has_ended = outcome.agreement.ends_all
            if has_ended:
                worker.close()  # collective: all ranks


def join(start: RankStart) -> Groups:
    """Return the groups of this rank once all ranks have joined. Its GPU, if any, becomes this thread's current one."""
    config = start.config
    device = take_device(config, start.rank)
    return connect(
        mesh_of(config),
        start.rank,
        Rendezvous(start.store, config.collective_timeout),
        check_order=config.debug_collectives,
        device=device,
    )


def take_device(config: EngineConfig, rank: int) -> torch.device:
    """Return the device of a rank's tensors. A GPU becomes this thread's current one, which torch uses for "cuda".

    GPUs are numbered as torch sees them, after CUDA_VISIBLE_DEVICES. Each rank on a host has its own; Ray shows an
    actor only its own.

    Raises:
        SettingsError: there are fewer GPUs than ranks.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    index = 0 if config.executor == "ray" else rank
    num_gpus = torch.cuda.device_count()
    if index >= num_gpus:
        raise SettingsError(too_few_gpus(config, num_gpus))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
