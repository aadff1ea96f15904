"""The model divided over ranks: the tokens of one rank, in every layout, with every dispatcher."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from ranks import Place, Ranks
from reference_models import Reference

from moeserve.config import Settings, resolve
from moeserve.distributed.group import connect
from moeserve.distributed.mesh import Mesh
from moeserve.messages import Chunk, SampleSpec, SamplingParams, StepPlan
from moeserve.models.registry import read_facts
from moeserve.scheduling.lockstep import Intent, Lockstep
from moeserve.worker.worker import Worker

NUM_TOKENS = 16
BLOCK_SIZE = 8
BLOCKS_PER_PROMPT = 8
LENGTHS = (1, 9, 23, 17)
GREEDY = SamplingParams(temperature=0)


def generate(
    place: Place, folder: str, tp: int, dp: int, dispatcher: str, prompts: list[list[list[int]]], check_order: bool
) -> list[list[int]]:
    """Greedy tokens of the prompts of this rank's replica: one prompt more in every step."""
    torch.set_num_threads(1)
    mesh = Mesh(tp=tp, dp=dp)
    groups = connect(
        mesh,
        place.rank,
        store_host=place.store_host,
        store_port=place.store_port,
        timeout_s=30,
        local_rank=place.rank,
        check_order=check_order,
    )
    options = {"dtype": "float32", "block_size": BLOCK_SIZE, "kv_cache_memory": "8MiB", "num_threads": 1}
    config = resolve(Settings.from_options(options), read_facts(folder), has_cuda=False, num_cores=1)
    worker = Worker(dataclasses.replace(config, dispatcher=dispatcher), groups, show_progress=False)
    mine = prompts[mesh.coordinates(place.rank).dp]
    lockstep = Lockstep(rank=mesh.coordinates(place.rank).dp, num_replicas=dp)
    tokens: list[list[int]] = [[] for _ in mine]
    step = 0
    while True:
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
        rows = groups.dp.all_gather(row, (1,) * dp)
        agreement = lockstep.finish(rows.tolist())
        if agreement.is_idle:
            return tokens
        result = worker.execute(plan, agreement)
        # The first rank of a replica chooses, and tells the others, as a plan would.
        chosen = [given.token_id for given in result.chunks] or [0] * len(running)
        chosen = groups.tp.broadcast(torch.tensor(chosen, dtype=torch.int64), 0).tolist()
        for index, token_id in zip(running, chosen, strict=True):
            tokens[index].append(token_id)
        step += 1


@pytest.mark.parametrize("dispatcher", ["allgather", "all_to_all"])
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "qwen3-moe", "gpt-oss", "qwen2-moe", "olmoe", "glm4-moe"])
def test_same_tokens(
    ranks: Ranks, reference_named: Callable[[str], Reference], name: str, tp: int, dp: int, dispatcher: str
) -> None:
    reference = reference_named(name)
    if reference.model.config.num_attention_heads % tp:
        pytest.skip(f"heads do not divide by {tp}")
    prompts = reference.prompts(*LENGTHS)
    of_replicas = [prompts[replica::dp] if replica else prompts[::dp] for replica in range(dp)]
    of_replicas[-1] = of_replicas[-1][:1]  # one replica is done long before the others
    given = ranks.run(
        tp * dp,
        "test_layouts:generate",
        folder=str(reference.folder),
        tp=tp,
        dp=dp,
        dispatcher=dispatcher,
        prompts=of_replicas,
        check_order=True,
    )
    for rank, tokens in enumerate(given):
        expected = [reference.greedy(prompt, NUM_TOKENS) for prompt in of_replicas[rank // tp]]
        assert tokens == expected
