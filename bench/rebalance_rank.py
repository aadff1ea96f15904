"""One rank of the benchmark of rebalancing: started by `rebalance.py`.

Runs steps of a worker as an engine does, prompts of random tokens, and times each. Knows no tables.
"""

from __future__ import annotations

import random
import time

import msgspec
import torch

from moeserve.distributed.group import Groups
from moeserve.models.decoder import Decoder
from moeserve.processes.child import Parent
from moeserve.protocol import Chunk, StepPlan
from moeserve.scheduling.lockstep import Agreement
from moeserve.telemetry.expert_load import LoadWindow, ranks_max_over_mean
from moeserve.worker.process import join
from moeserve.worker.protocol import RankStart
from moeserve.worker.worker import Worker

WARM_UP = 3  # steps that nobody measures


class RunSteps(msgspec.Struct, frozen=True, kw_only=True, tag="steps"):
    """Run so many steps, then bring the counts together, and then so many steps again with what comes of it.

    Without rebalancing nothing comes of it.
    """

    num_tokens: int  # of each replica in a step
    num_steps: int  # before, and once nothing moves any more
    most_steps: int  # until then
    hottest: float  # the last expert's router row is so much longer than the first one's


class Steps(msgspec.Struct, frozen=True, kw_only=True, tag="times"):
    """Of steps that followed each other."""

    seconds: list[float]  # of each
    max_over_mean: float  # of ranks, all layers together


class Ran(msgspec.Struct, frozen=True, kw_only=True, tag="ran"):
    before: Steps
    during: list[float]  # seconds of the steps in which plans were made or experts moved
    after: Steps
    num_layers_switched: int
    bytes_moved: int


def work(parent: Parent) -> None:
    start = parent.config(RankStart)
    channel = parent.channel(RunSteps)
    groups = join(start)
    worker = Worker(start.config, groups, show_progress=False)
    for order in channel.receive(None):
        channel.send(run(worker, groups, start, order))


@torch.inference_mode()
def run(worker: Worker, groups: Groups, start: RankStart, order: RunSteps) -> Ran:
    rebalancer = worker.rebalancer
    _skew(worker.runner.model, order.hottest)
    dice = random.Random(start.rank)
    num_replicas = start.config.data_parallel_size
    number = 0
    told: LoadWindow | None = None

    def step(*, collects_load: bool = False) -> float:
        nonlocal number, told
        number += 1
        began = time.perf_counter()
        # collective: all ranks; what the replicas would agree on
        epoch = groups.world.all_reduce_minimum(rebalancer.held_epoch if rebalancer else 0)
        agreement = Agreement(
            step=number,
            num_tokens=(order.num_tokens,) * num_replicas,
            collects_load=collects_load,
            is_idle=False,
            is_decode_only=False,
            is_shutdown=False,
            failed_ranks=(),
            placement_epoch=epoch,
            padded_tokens=order.num_tokens,
        )
        told = worker.execute(_plan(dice, start, number, order.num_tokens), agreement).load or told
        return time.perf_counter() - began

    def counted() -> float:
        """Of the steps since the last time, without a thought of moving anything."""
        collected = worker.load_meter.collect(rebalancer.epoch if rebalancer else 0)  # collective: all ranks
        assert collected is not None
        return ranks_max_over_mean(collected.window)

    for _ in range(WARM_UP):
        step()
    before = [step() for _ in range(order.num_steps)]
    during = [step(collects_load=True)]
    assert told is not None
    max_over_mean = ranks_max_over_mean(told)
    while rebalancer and rebalancer.is_busy and len(during) < order.most_steps:
        during.append(step())
    counted()
    after = [step() for _ in range(order.num_steps)]
    return Ran(
        before=Steps(seconds=before, max_over_mean=max_over_mean),
        during=during,
        after=Steps(seconds=after, max_over_mean=counted()),
        num_layers_switched=rebalancer.epoch if rebalancer else 0,
        bytes_moved=rebalancer.bytes_moved if rebalancer else 0,
    )


def _plan(dice: random.Random, start: RankStart, step: int, num_tokens: int) -> StepPlan:
    """A prompt of random tokens, all of it in this step."""
    num_blocks = -(-num_tokens // start.config.block_size)
    token_ids = [dice.randrange(start.config.vocab_size) for _ in range(num_tokens)]
    return StepPlan(step=step, chunks=[Chunk(token_ids=token_ids, start=0, block_ids=list(range(num_blocks)))])


def _skew(model: Decoder, hottest: float) -> None:
    """Makes router rows longer from expert to expert: longer ones are more often among the best."""
    for layer in model.moe_layers.values():
        scale = torch.logspace(0, 1, len(layer.router.weight), base=hottest)
        layer.router.weight.data.mul_(scale[:, None])
