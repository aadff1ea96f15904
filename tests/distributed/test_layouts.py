"""The model divided over ranks: the tokens of one rank, in every layout, with every dispatcher and placement.

Where a test does not say otherwise, steps with prompts are large and others small: see `small_steps.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from joining import join
from ranks import Place, Ranks
from reference_models import Reference
from small_steps import MIDDLE, border, bytes_of_tokens, check_ways

from moeserve.config.resolve import MachineFacts, resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.groups import Groups, groups_of_one_rank
from moeserve.models.registry import read_facts
from moeserve.protocol import Chunk, SampleSpec, StepPlan
from moeserve.sampling_params import SamplingParams
from moeserve.scheduling.lockstep import Intent, Lockstep
from moeserve.worker.worker import Worker

NUM_TOKENS = 16
BLOCK_SIZE = 8
BLOCKS_PER_PROMPT = 8
LENGTHS = (1, 9, 23, 17)
GREEDY = SamplingParams(temperature=0, logprobs=0)

Prompt = list[int]
Generated = tuple[
    list[list[int]],  # by prompt: tokens
    list[list[float]],  # and the log-probability of each
    list[int],  # by step: tokens of all ranks
]

DISPATCHERS = ("allgather", "all_to_all")
LAYOUTS = ((1, 2), (2, 1), (2, 2), (1, 4), (4, 1))
MODELS = ("mixtral", "deepseek-v3-four-heads", "qwen3-moe-eight-heads", "gpt-oss")
OTHER_MODELS = ("qwen2-moe", "olmoe", "glm4-moe", "deepseek-v2-lite")


def generate_here(
    place: Place, tp: int, dp: int, folder: str, max_small_tokens: int | None, **what: Any
) -> list[Generated]:
    """`generate` on one of several ranks, with each dispatcher. `max_small_tokens` as in worker_groups.py."""
    torch.set_num_threads(1)
    groups = join(place, tp, timeout_s=30, check_order=True)
    max_small_bytes = None if max_small_tokens is None else bytes_of_tokens(folder, max_small_tokens)
    with_each = []
    for dispatcher in DISPATCHERS:
        ways: list[bool] = []
        with border(max_small_bytes, ways.append):
            with_each.append(generate(groups, folder, dispatcher, **what))
        check_ways(with_each[-1][2], ways, max_small_tokens)
    return with_each


def generate(
    groups: Groups,
    folder: str,
    dispatcher: str,
    prompts: list[list[Prompt]],
    num_redundant: int = 0,
    loads: list[list[float]] | tuple[()] = (),
) -> Generated:
    """Greedy tokens of the prompts of this rank's replica, one prompt more in every step.

    Log-probabilities are those of the first rank of the replica; the others have none.
    """
    options = {"dtype": "float32", "block_size": BLOCK_SIZE, "kv_cache_memory": "8MiB", "num_threads": 1}
    config = resolve(parse_settings(options), read_facts(folder), MachineFacts(num_cores=1))
    config = dataclasses.replace(
        config, dispatcher=dispatcher, num_redundant_experts=num_redundant, expert_loads=tuple(map(tuple, loads))
    )
    worker = Worker(config, groups, show_progress=False)
    replica, num_replicas = groups.mesh.coordinates(groups.rank).dp, groups.mesh.dp
    mine = prompts[replica]
    lockstep = Lockstep(rank=replica, num_replicas=num_replicas)
    tokens: list[list[int]] = [[] for _ in mine]
    logprobs: list[list[float]] = [[] for _ in mine]
    num_tokens: list[int] = []
    while True:
        step = len(num_tokens)
        chunks, running = [], []
        for index, prompt in enumerate(mine[: step + 1]):
            if len(tokens[index]) == NUM_TOKENS:
                continue
            new = [tokens[index][-1]] if tokens[index] else prompt
            start = len(prompt) + len(tokens[index]) - len(new) if tokens[index] else 0
            blocks = list(range(index * BLOCKS_PER_PROMPT, (index + 1) * BLOCKS_PER_PROMPT))
            sample = SampleSpec(params=GREEDY, seed=0, position=len(tokens[index]))
            chunks.append(Chunk(token_ids=new, start=start, block_ids=blocks, sample=sample))
            running.append(index)
        plan = StepPlan(step=step, chunks=chunks)
        row = torch.tensor([lockstep.begin(Intent(num_tokens=plan.num_tokens, is_decode_only=False))])
        rows = groups.dp.all_gather(row, (1,) * num_replicas)
        agreement = lockstep.finish(rows.tolist())
        if agreement.is_idle:
            return tokens, logprobs, num_tokens
        result = worker.execute(plan, agreement)
        for index, given in zip(running, result.chunks, strict=False):
            assert given.logprobs is not None
            logprobs[index].append(given.logprobs.logprobs[0])
        # The first rank of a replica chooses, and tells the others, as a plan would.
        chosen = [given.token_id for given in result.chunks] or [0] * len(running)
        chosen = groups.tp.broadcast(torch.tensor(chosen, dtype=torch.int64), 0).tolist()
        for index, token_id in zip(running, chosen, strict=True):
            tokens[index].append(token_id)
        num_tokens.append(sum(agreement.num_tokens))


@functools.cache
def prompts_of(reference: Reference) -> list[Prompt]:
    return reference.clear_prompts(LENGTHS, NUM_TOKENS)


def assert_same_as_one_rank(
    ranks: Ranks, reference: Reference, tp: int, dp: int, max_small_tokens: int | None = MIDDLE, **placement: Any
) -> None:
    """With each dispatcher the tokens are those of transformers, the log-probabilities those of one rank."""
    prompts = prompts_of(reference)
    of_replicas = [prompts[replica::dp] or prompts[:1] for replica in range(dp)]
    if dp > 1:
        of_replicas[-1] = of_replicas[-1][:1]  # one replica is done long before the others
    if dp > 2:
        of_replicas[1] = []  # and one has nothing at all
    what = dict(folder=str(reference.folder), max_small_tokens=max_small_tokens, prompts=of_replicas, **placement)
    given = ranks.run(tp * dp, "test_layouts:generate_here", tp=tp, dp=dp, **what)
    _, alone, _ = generate(groups_of_one_rank(), str(reference.folder), "local", [prompts])
    for rank, with_each in enumerate(given):
        mine = of_replicas[rank // tp]
        assert len(with_each) == len(DISPATCHERS)
        for dispatcher, (tokens, logprobs, _) in zip(DISPATCHERS, with_each, strict=True):
            assert tokens == [reference.greedy(prompt, NUM_TOKENS) for prompt in mine], dispatcher
            if rank % tp == 0:
                assert len(logprobs) == len(mine)
                for prompt, found in zip(mine, logprobs, strict=True):
                    assert found == pytest.approx(alone[prompts.index(prompt)], abs=1e-5, rel=0), dispatcher


@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_same_tokens(ranks: Ranks, reference_named: Callable[[str], Reference], name: str, tp: int, dp: int) -> None:
    """12, 9 and 5 experts on 4 ranks, and 9 and 5 on 2, are unevenly divided."""
    assert_same_as_one_rank(ranks, reference_named(name), tp, dp)


@pytest.mark.parametrize("name", MODELS)
def test_same_tokens_on_eight_ranks(ranks: Ranks, reference_named: Callable[[str], Reference], name: str) -> None:
    """4 and 5 experts on 8 ranks: some ranks have none."""
    assert_same_as_one_rank(ranks, reference_named(name), 1, 8)


@pytest.mark.parametrize(
    ("tp", "dp", "num_redundant", "max_small_tokens"), [(1, 2, 3, 0), (2, 2, 6, MIDDLE), (1, 4, 1, None)]
)
@pytest.mark.parametrize("name", MODELS)
def test_same_tokens_with_copies_of_hot_experts(
    ranks: Ranks,
    reference_named: Callable[[str], Reference],
    name: str,
    tp: int,
    dp: int,
    num_redundant: int,
    max_small_tokens: int | None,
) -> None:
    """With all steps large, with steps of both ways, and with all small."""
    reference = reference_named(name)
    facts = read_facts(reference.folder)
    loads = [
        [math.exp(-((expert + layer) % facts.num_experts)) for expert in range(facts.num_experts)]
        for layer in range(facts.num_sparse_layers)
    ]
    assert_same_as_one_rank(ranks, reference, tp, dp, max_small_tokens, num_redundant=num_redundant, loads=loads)


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_same_tokens_of_other_families(ranks: Ranks, reference_named: Callable[[str], Reference], name: str) -> None:
    reference = reference_named(name)
    tp = 1 if reference.model.config.num_attention_heads % 2 else 2
    assert_same_as_one_rank(ranks, reference, tp, 4 // tp, num_redundant=2)
