"""One pool of a simulated cluster: replicas in lockstep in virtual time, and their transfers of KV cache blocks.

Each rank has three links: one for copies between the KV cache and the host's memory, one for blocks sent to other
replicas, and one for blocks received. A link carries one copy at a time. All ranks of a replica copy equal amounts.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from moeserve.cache_kind import CacheKind
from moeserve.config.validation import parse_bytes
from moeserve.kv.connector import HostTier
from moeserve.planner.clock import Clock
from moeserve.planner.costs import LayoutCosts, ReplicaLoad, StepLoad
from moeserve.planner.expert_balance import ExpertBalance
from moeserve.planner.lockstep_group import LockstepGroup, Step
from moeserve.planner.settings import SimulationSettings
from moeserve.planner.simulation_report import Percentiles, PoolOutcome, TransferTotals
from moeserve.protocol import (
    AddRequest,
    CancelReceive,
    ChunkResult,
    Delivery,
    KeepItems,
    ReceiveItems,
    Request,
    StepPlan,
    StepResult,
    StoreTransfer,
    TransferResult,
)
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.scheduler_config import SchedulerConfig

BLOCK_SIZE = 16  # tokens per block of the KV cache
Report: TypeAlias = tuple[int, Delivery]  # a replica's index, and its delivery after a round


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """A pool of replicas before it runs: its layout, its costs and its cache."""

    num_nodes: int
    costs: LayoutCosts
    balance: ExpertBalance
    cache_tokens: int  # capacity of a replica's KV cache
    cache_bytes_per_token: int  # on the rank with the largest cache


# Blocks that a replica keeps for another pool, by handle: the replica's pool, its index, and the transfer's number.
Kept: TypeAlias = "dict[str, tuple[Pool, int, int]]"


class Pool:
    """Replicas in lockstep in virtual time.

    `next_s` is the time of the next event. At this time, call `finish` to end the step in flight, and then `begin`.
    """

    def __init__(
        self,
        name: str,
        plan: PoolPlan,
        settings: SimulationSettings,
        kept: Kept,
        *,
        max_model_len: int,
        finds_prefixes: bool,
        decodes: bool = True,
        shares_blocks: bool = False,
        starts_at: float = 0.0,
        drives_all: bool = False,
    ) -> None:
        """
        Args:
            kept: blocks kept for other pools; the same object for all pools.
            decodes: False: the pool only computes prompts, so long chunks cannot delay other requests' tokens.
            shares_blocks: replicas keep blocks for other pools, or receive blocks from other pools.
            starts_at: earliest virtual time of the first step.
            drives_all: see `LockstepGroup`.
        """
        self.name, self.plan, self.num_replicas = name, plan, plan.costs.dp
        self._kept, self._shares_blocks = kept, shares_blocks
        self._config = _config(plan, settings, max_model_len, finds_prefixes=finds_prefixes, decodes=decodes)
        self._max_rounds = 2 if self._config.plans_ahead else plan.costs.pp
        self._group = LockstepGroup(
            self.num_replicas, self._new_scheduler, max_rounds=self._max_rounds, drives_all=drives_all
        )
        self._clock = Clock(plan.costs.pp, settings.host_time)
        self._clock.rest_until(starts_at)
        self._starts_at = starts_at
        self._balance = plan.balance
        self._step: Step | None = None  # the step in flight
        self._wakes_at = math.inf  # time at which the next round may begin
        self._ranks = defaultdict[int, _Ranks](_Ranks)  # stand-ins for the ranks of each replica
        # Heap of transfers in flight: end time, a number that orders equal times, replica, outcome.
        self._transfers: list[tuple[float, int, int, TransferResult]] = []
        self._num_ends = 0
        self._free_at = defaultdict[tuple[str, int], float](float)  # time at which a link is free, by link and replica
        self._block_bytes = BLOCK_SIZE * plan.cache_bytes_per_token
        # Number of blocks in each replica's host memory tier of the KV cache; 0: no such tier.
        self._host_blocks = parse_bytes("kv_host_memory", settings.kv_host_memory, least=0) // self._block_bytes
        host_bandwidth = settings.host_bandwidth * plan.costs.assumptions.link_efficiency
        self._host_s_per_block = self._block_bytes / host_bandwidth
        self._network_s_per_block = self._block_bytes / plan.costs.network_bandwidth
        # Statistics:
        self._used: set[int] = set()  # indices of replicas that received requests
        self._loaded: list[_Copy] = []
        self._saved: list[_Copy] = []
        self._received: list[_Copy] = []
        self._num_decode_only = self._tokens_run = self._idle_steps = self._max_blocks_used = self._output_tokens = 0
        self._step_s, self._fullest = array("d"), array("d")
        self._balance_at_start = plan.balance.expected
        self._balance_s = 0.0  # sum over steps: expected balance times seconds

    @property
    def next_s(self) -> float:
        """Time of the next event; infinite if there is none."""
        if self._step is not None:
            return self._clock.now
        ends_at = self._transfers[0][0] if self._transfers else math.inf
        return max(self._starts_at, min(self._wakes_at, ends_at))

    @property
    def is_running(self) -> bool:
        """True while a step is in flight."""
        return self._step is not None

    def send(self, index: int, request: Request, now: float) -> None:
        """Send a request to the replica `index` at the virtual time `now`."""
        self._used.add(index)
        self._group.send(index, AddRequest(request))
        self._wakes_at = min(self._wakes_at, now)

    def finish(self, now: float) -> list[Report]:
        """End the transfers and the step that end at `now`. Return the deliveries of replicas."""
        while self._transfers and self._transfers[0][0] <= now:
            _, _, index, outcome = heapq.heappop(self._transfers)
            self._group.end_transfer(index, outcome)
            self._wakes_at = now
        if self._step is None:
            return []
        plans, self._step = self._step.plans, None
        self._wakes_at = now
        return self._end_round({rank: self._ranks[rank].run(plan) for rank, plan in plans.items()})

    def begin(self, now: float) -> list[Report]:
        """Begin a step, unless the pool has not started or no replica has work. Return the deliveries of replicas."""
        if self._step is not None or self._wakes_at > now or self._starts_at > now:
            return []
        reports: list[Report] = []
        self._wakes_at = math.inf
        if now > self._clock.now:
            self._balance.rest(now - self._clock.now)
            self._clock.rest_until(now)
        # A replica that receives work may still have earlier rounds without a plan in flight.
        for _ in range(self._max_rounds + 1):
            step = self._group.begin()
            reports += step.woken
            if not step.agreement.is_idle:
                self._run(step)
                break
            reports += self._end_round({})
            self._clock.skip()
        self._begin_transfers(now)
        return reports

    def _new_scheduler(self, index: int) -> Scheduler:
        tier = HostTier({CacheKind.BLOCK: self._host_blocks}) if self._host_blocks else None
        return Scheduler(self._config, b"", tier, [f"{self.name} {index}"] if self._shares_blocks else [])

    def _end_round(self, results: dict[int, StepResult]) -> list[Report]:
        deliveries = self._group.finish(results, self._step_s[-1] if results else 0.0)
        self._output_tokens += sum(len(update.token_ids) for _, each in deliveries for update in each.updates)
        return deliveries

    def _run(self, step: Step) -> None:
        """Begin a step of all replicas, and advance the clock to the end of the step."""
        plans = step.plans
        load = StepLoad.of([load_of(plan) for plan in plans.values()])
        costs = self.plan.costs.for_step(load)
        expected = self._balance.expected
        fullest = costs.imbalance(load.num_tokens, expected).value
        of_stages = costs.stage_seconds(load, fullest)
        moving_s = self._balance.advance(load, max(of_stages))
        seconds = self._clock.run(of_stages, moving_s, step.planned_after)
        self._step = step

        self._step_s.append(sum(of_stages) + moving_s)
        self._num_decode_only += not load.num_prefill
        self._fullest.append(fullest)
        self._balance_s += expected * seconds
        self._tokens_run += round(load.num_tokens)
        self._idle_steps += self.num_replicas - len(plans)
        used = [self._config.num_blocks - self._group.num_free_blocks(rank) for rank in plans]
        self._max_blocks_used = max(self._max_blocks_used, *used)

    def _begin_transfers(self, now: float) -> None:
        for index, transfer in sorted(self._group.take_transfers(), key=lambda begun: begun[0]):
            match transfer:
                case StoreTransfer(number=number, places=places):
                    seconds = len(places) * self._host_s_per_block
                    ends_at = self._free_at["host", index] = max(now, self._free_at["host", index]) + seconds
                    copies = self._loaded if transfer.is_load else self._saved
                case KeepItems(number=number, handle=handle):
                    self._kept[handle] = self, index, number
                    continue
                case ReceiveItems(number=number, places=places):
                    pool, sender, kept_number = self._kept.pop(transfer.source.handle)
                    seconds, ends_at = len(places) * self._network_s_per_block, now
                    if places:
                        begins_at = max(now, pool._free_at["sending", sender], self._free_at["receiving", index])
                        ends_at = begins_at + seconds
                        pool._free_at["sending", sender] = self._free_at["receiving", index] = ends_at
                    pool._add_end(sender, TransferResult(number=kept_number, num_copied=0, seconds=0.0), ends_at)
                    copies = self._received
                case CancelReceive():
                    raise AssertionError("no simulated request is aborted")
            if places:
                copies.append(_Copy(len(places), seconds, ends_at - now))
            self._add_end(index, TransferResult(number=number, num_copied=len(places), seconds=seconds), ends_at)

    def _add_end(self, index: int, outcome: TransferResult, at_s: float) -> None:
        self._num_ends += 1
        heapq.heappush(self._transfers, (at_s, self._num_ends, index, outcome))

    def outcome(self, ended_at: float) -> PoolOutcome:
        """Return the statistics of the pool.

        Args:
            ended_at: virtual time at which the pool ended.
        """
        clock, num_steps = self._clock, max(1, len(self._step_s))
        seconds = ended_at - self._starts_at
        return PoolOutcome(
            name=self.name,
            num_nodes=self.plan.num_nodes,
            dp=self.num_replicas,
            cache_tokens=self.plan.cache_tokens,
            starts_at=self._starts_at,
            seconds=seconds,
            busy_s=clock.busy_s,
            output_tokens=self._output_tokens,
            output_tokens_per_s=self._output_tokens / seconds if seconds else 0.0,
            num_steps=len(self._step_s),
            step_s=Percentiles.of(self._step_s),
            decode_only_share=self._num_decode_only / num_steps,
            host_s=clock.host_s,
            host_waited_s=clock.host_waited_s,
            fullest_rank=Percentiles.of(self._fullest),
            tokens_run=self._tokens_run,
            tokens_per_step=self._tokens_run / num_steps,
            idle_step_share=self._idle_steps / (num_steps * self.num_replicas),
            num_replicas_used=len(self._used),
            num_preemptions=self._group.num_preemptions,
            cache_used_most=self._max_blocks_used / self._config.num_blocks,
            loaded=_totals(self._loaded, self._block_bytes),
            saved=_totals(self._saved, self._block_bytes),
            received=_totals(self._received, self._block_bytes),
            balance_at_start=self._balance_at_start,
            balance_mean=self._balance_s / clock.busy_s if clock.busy_s else self._balance_at_start,
            balance_at_end=self._balance.expected,
            rebalances=tuple(self._balance.rebalances),
        )


def _config(
    plan: PoolPlan, settings: SimulationSettings, max_model_len: int, *, finds_prefixes: bool, decodes: bool
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=plan.cache_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_prefill_tokens=settings.max_prefill_tokens if decodes else 0,
        max_model_len=max_model_len,
        enable_prefix_caching=finds_prefixes,
        plans_ahead=settings.async_scheduling and plan.costs.pp == 1,
        num_batches=plan.costs.pp,
    )


class _Copy(NamedTuple):
    """A transfer of KV cache blocks: the time that the link was busy, and the time including the wait for the link."""

    num_blocks: int
    busy_s: float
    takes_s: float


def _totals(copies: Sequence[_Copy], block_bytes: int) -> TransferTotals:
    num_blocks = sum(copy.num_blocks for copy in copies)
    return TransferTotals(
        num_transfers=len(copies),
        num_tokens=num_blocks * BLOCK_SIZE,
        num_bytes=num_blocks * block_bytes,
        busy_s=sum((copy.busy_s for copy in copies), 0.0),
        takes_s=Percentiles.of([copy.takes_s for copy in copies]),
    )


def load_of(plan: StepPlan) -> ReplicaLoad:
    """Return the load of a plan. A chunk of one token counts as decoding, a longer one as prefill."""
    num_decoding = decode_pairs = num_prefill = prefill_pairs = 0
    for start, num_tokens in zip(plan.starts, plan.lengths, strict=True):
        if num_tokens == 1:
            num_decoding += 1
            decode_pairs += start + 1
        else:
            num_prefill += num_tokens
            prefill_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2
    return ReplicaLoad(
        num_decoding=num_decoding, decode_pairs=decode_pairs, num_prefill=num_prefill, prefill_pairs=prefill_pairs
    )


def own_token(number: int) -> int:
    """Return the token id that stands for all own tokens of request `number`. No recorded block has this id."""
    return -1 - number


class _Ranks:
    """Stand-ins for the ranks of a replica. Wherever a rank would sample, they return the request's own token."""

    def __init__(self) -> None:
        self._request_of_slot: dict[int, tuple[int, int]] = {}  # request's number, and number of tokens known so far

    def run(self, plan: StepPlan) -> StepResult:
        for new in plan.registrations:
            self._request_of_slot[new.slot] = new.seed, len(new.token_ids)
        chunks = []
        for slot, start, length in zip(plan.slots, plan.starts, plan.lengths, strict=True):
            number, num_known = self._request_of_slot[slot]
            if start + length < num_known:
                chunks.append(_NO_TOKEN)
            else:
                self._request_of_slot[slot] = number, num_known + 1
                chunks.append(ChunkResult(token_ids=[own_token(number)]))
        return StepResult(step=plan.step, chunks=chunks)


_NO_TOKEN = ChunkResult()
