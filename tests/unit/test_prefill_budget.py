"""Prefill budgets: no replica's prompts delay the tokens of all others for long, and no prompt waits for ever."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from moeserve.planner.lockstep_group import LockstepGroup, Step
from moeserve.protocol import AddRequest, ChunkResult, Request, StepPlan, StepResult
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import LEAST_PREFILL_BUDGET, Intent, agree, make_row
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.scheduler_config import SchedulerConfig
from moeserve.worker.request_table import RequestTable

BATCHED, MOST_PREFILL = 4096, 300
CONFIG = SchedulerConfig(
    num_blocks=10_000,
    block_size=16,
    max_num_seqs=64,
    max_num_batched_tokens=BATCHED,
    max_model_len=16_000,
    enable_prefix_caching=False,
    max_prefill_tokens=MOST_PREFILL,
)


def budget(*demands: tuple[int, int]) -> int | None:
    """Return the budget that follows from decoding requests and waiting prompt tokens of each replica."""
    rows = [
        make_row(
            Intent(num_tokens=1, is_decode_only=True, num_decoding=num_decoding, num_prefill_tokens=num_prefill),
            number=7,
            replica=index,
        )
        for index, (num_decoding, num_prefill) in enumerate(demands)
    ]
    return agree(rows, number=7, num_replicas=len(rows)).prefill_budget


def test_prefills_are_limited_only_where_others_decode() -> None:
    assert budget((5, 9000)) is None  # one replica delays nobody else
    assert budget((0, 9000), (0, 40)) is None
    assert budget((0, 0), (0, 0)) is None
    assert budget((0, 9000), (1, 0)) is not None


def test_budgets_grow_with_what_waits_everywhere() -> None:
    assert budget((1, 0), (0, 0)) == LEAST_PREFILL_BUDGET
    assert budget((1, 8000), *[(3, 0)] * 319) == LEAST_PREFILL_BUDGET  # one of many does not delay all of them much
    assert budget((1, 8000), *[(3, 8000)] * 319) == 2000
    assert budget((1, 16000), (0, 0)) == 2000


@dataclass
class Group:
    """Replicas in lockstep whose ranks sample a constant. It records the rounds that are not idle."""

    num_replicas: int
    max_rounds: int
    plans_ahead: bool = True
    steps: list[Step] = field(default_factory=list)  # without idle rounds
    first_token_round: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = CONFIG if self.plans_ahead else SchedulerConfig(**{**vars(CONFIG), "plans_ahead": False})
        self.group = LockstepGroup(self.num_replicas, lambda _: Scheduler(config, b""), max_rounds=self.max_rounds)
        self.waiting = [0] * self.num_replicas  # prompt tokens; not exact to one for each request
        self.tables = [RequestTable(CONFIG.max_num_seqs, 1000) for _ in range(self.num_replicas)]

    def send(self, index: int, name: str, num_prompt_tokens: int, max_tokens: int) -> None:
        params = RequestParams(max_tokens=max_tokens)
        prompt = [0] * num_prompt_tokens
        self.waiting[index] += num_prompt_tokens
        self.group.send(index, AddRequest(Request(request_id=name, prompt_token_ids=prompt, params=params, seed=0)))

    def run_round(self) -> Step:
        step = self.group.begin()
        if not step.agreement.is_idle:
            self.steps.append(step)
        results = {index: self._run(index, plan) for index, plan in step.plans.items()}
        for _, delivery in self.group.finish(results):
            for update in delivery.updates:
                self.first_token_round.setdefault(update.request_id, self.group.num_rounds - 1)
        return step

    def _run(self, index: int, plan: StepPlan) -> StepResult:
        self.waiting[index] -= prefill_tokens(plan)
        chunks = self.tables[index].apply(plan)
        if self.plans_ahead:
            self.tables[index].append_tokens(chunks, [7] * sum(chunk.samples for chunk in chunks))
        return StepResult(
            step=plan.step, chunks=[ChunkResult(token_ids=[7] if chunk.samples else []) for chunk in chunks]
        )


def prefill_tokens(plan: StepPlan) -> int:
    return sum(length for length in plan.lengths if length > 1)


def limits_of(group: Group) -> list[int]:
    """Return the most prompt tokens of any replica in each round: agreement m limits round m + max_rounds."""
    budgets = [step.agreement.prefill_budget for step in group.steps]
    in_effect = [None] * group.max_rounds + budgets[: -group.max_rounds]
    return [BATCHED if each is None else min(each, MOST_PREFILL) for each in in_effect]


def test_an_idle_group_computes_a_whole_prompt_in_one_step() -> None:
    """Also after a rest: what was announced before it limits nothing."""
    group = Group(num_replicas=3, max_rounds=2)
    for name in ("first", "second"):
        group.send(0, name, 3000, max_tokens=5)
        while name not in group.first_token_round:
            group.run_round()
        while group.run_round().agreement.has_requests:
            pass
    sizes = [prefill_tokens(plan) for step in group.steps for plan in step.plans.values()]
    assert [size for size in sizes if size] == [3000, 3000]


@pytest.mark.parametrize(("max_rounds", "plans_ahead"), [(1, False), (2, True), (3, True)])
def test_a_budget_applies_a_fixed_number_of_rounds_later(max_rounds: int, plans_ahead: bool) -> None:
    """A long prompt meets a request that begins to decode on another replica."""
    group = Group(2, max_rounds, plans_ahead)
    group.send(0, "short", 1, max_tokens=300)
    group.send(1, "long", max_rounds * BATCHED + 1000, max_tokens=2)
    while "long" not in group.first_token_round:
        group.run_round()
    sizes = [prefill_tokens(step.plans[1]) for step in group.steps[: max_rounds + 3]]
    assert sizes == limits_of(group)[: max_rounds + 3]
    assert sizes[max_rounds] < sizes[0] == BATCHED


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("max_rounds", "plans_ahead"), [(1, False), (2, True), (4, True)])
def test_neither_prompts_nor_tokens_wait_longer_than_their_bounds(
    max_rounds: int, plans_ahead: bool, seed: int
) -> None:
    """A decoding request runs in every round, beside at most as many prompt tokens as the budget allows. Once the
    rounds in flight have ended, a prompt and those before it in its replica get LEAST_PREFILL_BUDGET tokens a round,
    except for the half that they leave to those behind them.
    """
    dice = random.Random(seed)
    group = Group(dice.randint(2, 6), max_rounds, plans_ahead)
    group.send(0, "decodes", 1, max_tokens=10_000)
    latest: dict[str, int] = {}
    for number in range(250):
        for _ in range(dice.choice([0, 0, 0, 1, 1, 5])):
            if number < 120:
                index, name, num_tokens = dice.randrange(group.num_replicas), str(len(latest)), dice.randint(1, 1500)
                group.send(index, name, num_tokens, max_tokens=dice.randint(1, 40))
                latest[name] = number + max_rounds + -(-group.waiting[index] // (LEAST_PREFILL_BUDGET // 2))
        group.run_round()
    assert len(latest) > 50
    assert {
        name: group.first_token_round[name] for name in latest if group.first_token_round[name] > latest[name]
    } == {}
    for step, limit in zip(group.steps, limits_of(group), strict=True):
        assert max(map(prefill_tokens, step.plans.values())) <= limit
    assert len(group.steps) == 249  # in the first round, the request was not planned yet
    assert all(step.plans[0].lengths[0] == 1 for step in group.steps)
