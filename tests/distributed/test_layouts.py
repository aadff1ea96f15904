"""The model divided over ranks: the tokens of transformers in all layouts, with both dispatchers and with placements.

Pairs of parameters occur together, not all combinations: see `CASES`.
"""

from __future__ import annotations

import dataclasses
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
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import Intent, Lockstep
from moeserve.worker.worker import Worker

NUM_TOKENS = 12
BLOCK_SIZE = 8
BLOCKS_PER_PROMPT = 8
LENGTHS = (1, 9, 23, 17)
GREEDY = RequestParams(temperature=0, logprobs=0)

Prompt = list[int]
Generated = tuple[
    list[list[int]],  # by prompt: tokens
    list[list[float]],  # and the log-probability of each
    list[int],  # by step: tokens of all ranks
]

DISPATCHERS = ("allgather", "all_to_all")
LAYOUTS = ((4, 1), (2, 2), (1, 8))  # tp, dp; some of 8 ranks have no experts
MODELS = ("mixtral", "deepseek-v3-four-heads", "qwen3-moe-eight-heads", "gpt-oss")  # with 4, 12, 9 and 5 experts
NUM_REDUNDANT = (0, 1, 3, 6)
# The largest small step in tokens: all steps large, all small (None), or both in turn; see small_steps.py.
MAX_SMALL_TOKENS = (MIDDLE, 0, None, MIDDLE)
DOUBLE = (0, 2, 3, 1)  # in the field of four elements, where + is ^

# Each value of a parameter occurs with each layout: indices are orthogonal Latin squares.
CASES = [
    (
        model,
        *layout,
        DISPATCHERS[(row + column) % 2],
        NUM_REDUNDANT[row ^ column],
        MAX_SMALL_TOKENS[DOUBLE[row] ^ column],
    )
    for row, model in enumerate(MODELS)
    for column, layout in enumerate(LAYOUTS)
]
CASES += [(name, 2, 2, "all_to_all", 2, MIDDLE) for name in ("qwen2-moe", "olmoe", "glm4-moe")]
CASES += [("deepseek-v2-lite", 1, 4, "allgather", 2, MIDDLE)]  # with an odd number of heads


def generate_here(
    place: Place, tp: int, dp: int, folder: str, dispatcher: str, max_small_tokens: int | None, **what: Any
) -> Generated:
    """Run `generate` on one of several ranks."""
    torch.set_num_threads(1)
    groups = join(place, tp, timeout_s=30, check_order=True)
    max_small_bytes = None if max_small_tokens is None else bytes_of_tokens(folder, max_small_tokens)
    ways: list[bool] = []
    with border(max_small_bytes, ways.append):
        found = generate(groups, folder, dispatcher, **what)
    check_ways(found[2], ways, max_small_tokens)
    return found


def generate(
    groups: Groups,
    folder: str,
    dispatcher: str,
    prompts: list[list[Prompt]],
    num_redundant: int = 0,
    loads: list[list[float]] | tuple[()] = (),
) -> Generated:
    """Generate greedily from the prompts of this rank's replica, beginning one more prompt in every step.

    The first rank of the replica returns log-probabilities, the others none.
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
        # The first rank of a replica samples, and sends the tokens to the others, as a plan would.
        chosen = [given.token_id for given in result.chunks] or [0] * len(running)
        chosen = groups.tp.broadcast(torch.tensor(chosen, dtype=torch.int64), 0).tolist()
        for index, token_id in zip(running, chosen, strict=True):
            tokens[index].append(token_id)
        num_tokens.append(sum(agreement.num_tokens))


@pytest.mark.parametrize(("name", "tp", "dp", "dispatcher", "num_redundant", "max_small_tokens"), CASES)
def test_tokens_of_transformers(
    ranks: Ranks,
    reference_named: Callable[[str], Reference],
    name: str,
    tp: int,
    dp: int,
    dispatcher: str,
    num_redundant: int,
    max_small_tokens: int | None,
) -> None:
    """Log-probabilities are those of one rank."""
    reference = reference_named(name)
    folder = str(reference.folder)
    prompts = reference.clear_prompts(LENGTHS, NUM_TOKENS)
    prompts_of_replica = [prompts[replica::dp] or prompts[:1] for replica in range(dp)]
    if dp > 1:
        prompts_of_replica[-1] = prompts_of_replica[-1][:1]  # one replica ends long before the others
    if dp > 2:
        prompts_of_replica[1] = []  # and one has no prompt at all
    arguments: dict[str, Any] = dict(folder=folder, dispatcher=dispatcher, max_small_tokens=max_small_tokens)
    arguments |= dict(num_redundant=num_redundant, loads=uneven_loads(folder) if num_redundant else [])
    by_rank = ranks.run(tp * dp, "test_layouts:generate_here", tp=tp, dp=dp, prompts=prompts_of_replica, **arguments)
    _, alone, _ = generate(groups_of_one_rank(), folder, "local", [prompts])
    for rank, (tokens, logprobs, _) in enumerate(by_rank):
        mine = prompts_of_replica[rank // tp]
        assert tokens == [reference.greedy(prompt, NUM_TOKENS) for prompt in mine]
        if rank % tp == 0:
            for prompt, found in zip(mine, logprobs, strict=True):
                assert found == pytest.approx(alone[prompts.index(prompt)], abs=1e-5, rel=0)


def uneven_loads(folder: str) -> list[list[float]]:
    """Return loads with hot experts, different ones in each layer."""
    facts = read_facts(folder)
    return [
        [math.exp(-((expert + layer) % facts.num_experts)) for expert in range(facts.num_experts)]
        for layer in range(facts.num_sparse_layers)
    ]
