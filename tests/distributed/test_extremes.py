"""The whole model on four ranks with the most uneven routing and load possible: the tokens of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import worker_groups
from ranks import Ranks
from reference_models import SHAPES, Reference, make_reference
from small_steps import MIDDLE, check_ways
from worker_groups import Arrival, Story, Timetable

from moeserve.protocol import Request, RequestUpdate
from moeserve.sampling_params import SamplingParams

NUM_RANKS = 4
NUM_TOKENS = 6
FULL_BATCH = 64
OPTIONS: dict[str, Any] = dict(
    max_model_len=64, block_size=8, max_num_seqs=8, max_num_batched_tokens=FULL_BATCH, kv_cache_memory="1MiB"
)
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=5)

# As in reference_models.py, with several experts on each of four ranks, and with heads that two ranks can divide.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": dict(num_local_experts=8, num_experts_per_tok=2),
    "deepseek-v3": dict(
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts_per_tok=3,
        num_hidden_layers=3,
        first_k_dense_replace=1,
    ),
    "gpt-oss": dict(num_local_experts=8, num_experts_per_tok=2),
}
NUM_EXPERTS = {"mixtral": 8, "deepseek-v3": 12, "gpt-oss": 8}
LOADED_RANK = 3  # receives all tokens if one rank does
EMPTY_RANK = 1  # receives none if one rank does not
ONE_TOKEN_REPLICA = 1


ROUTINGS = ("one rank", "empty rank", "every expert")


@dataclass(frozen=True)
class Layout:
    tp: int
    dp: int
    dispatcher: str
    max_small_tokens: int | None = MIDDLE  # see small_steps.py


LAYOUTS = (
    Layout(1, 4, "all_to_all", 0),
    Layout(1, 4, "allgather", MIDDLE),
    Layout(2, 2, "all_to_all", MIDDLE),
    Layout(2, 2, "allgather", None),
)


@dataclass(frozen=True)
class Case:
    """A checkpoint with its routing, and the requests that it serves."""

    name: str
    routing: str
    reference: Reference
    top_k: int
    layouts: list[Layout]
    even: list[list[int]]  # prompts for all replicas
    single: list[int]  # a prompt of one token, for one replica
    full: list[list[int]]  # prompts that fill a step of one replica

    def timetable(self, num_replicas: int) -> Timetable:
        """Return three loads, each after the one before: even, one token in all, and a full batch on one replica."""
        loads = [(0, index % num_replicas, prompt) for index, prompt in enumerate(self.even)]
        loads += [(10, ONE_TOKEN_REPLICA % num_replicas, self.single)]
        loads += [(20, num_replicas - 1, prompt) for prompt in self.full]
        return Timetable(
            arrivals=[
                Arrival(
                    round=round_,
                    replica=replica,
                    request=Request(request_id=str(index), prompt_token_ids=prompt, params=PARAMS.for_engine(), seed=0),
                )
                for index, (round_, replica, prompt) in enumerate(loads)
            ]
        )

    @property
    def prompts(self) -> list[list[int]]:
        return [*self.even, self.single, *self.full]

    def experts_of(self, rank: int) -> range:
        per_rank = NUM_EXPERTS[self.name] // NUM_RANKS
        return range(per_rank * rank, per_rank * (rank + 1))


@pytest.fixture(scope="module", params=list(product(FAMILIES, ROUTINGS)), ids=" ".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, routing = request.param
    shape = SHAPES[name]
    settings = shape.settings | FAMILIES[name]
    if routing == "every expert":
        settings["num_experts_per_tok"] = NUM_EXPERTS[name]
        if "n_group" in settings:
            settings["topk_group"] = settings["n_group"]
    folder = tmp_path_factory.mktemp(name)
    reference = make_reference(folder, dataclasses.replace(shape, settings=settings))
    per_rank = NUM_EXPERTS[name] // NUM_RANKS
    if routing == "one rank":
        lean(reference.model, range(per_rank * LOADED_RANK, per_rank * (LOADED_RANK + 1)), 1.0)
    elif routing == "empty rank":
        lean(reference.model, range(per_rank * EMPTY_RANK, per_rank * (EMPTY_RANK + 1)), -1.0)
    reference.model.save_pretrained(folder)
    prompts = reference.clear_prompts([9, 17, 1, 30, 5, 12, 1, 23, 17, 24], NUM_TOKENS)
    assert sum(map(len, prompts[7:])) == FULL_BATCH
    family, kind = list(FAMILIES).index(name), ROUTINGS.index(routing)
    # Two layouts for each case, so that each occurs with each family and with each routing.
    layouts = [LAYOUTS[index] for index in {(family + kind) % 4, (family - kind + 3) % 4}]
    top_k = settings["num_experts_per_tok"]
    return Case(name, routing, reference, top_k, layouts, prompts[:6], prompts[6], prompts[7:])


def lean(model: Any, experts: Sequence[int], sign: float) -> None:
    """Change the routers so that every token prefers some experts to all others (or others to them, with -1)."""
    with torch.no_grad():
        for layer in model.model.layers:
            router = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
            if router is None:  # a dense layer
                continue
            if hasattr(router, "e_score_correction_bias"):
                router.e_score_correction_bias[experts] += 4 * sign
            elif hasattr(router, "bias"):
                router.bias[experts] += 16 * sign
            else:
                router.weight[experts, 0] = 40 * sign
        if not any(
            hasattr(module, "e_score_correction_bias") or hasattr(module, "sinks") for module in model.modules()
        ):
            make_first_channel_constant(model)


def make_first_channel_constant(model: Any) -> None:
    """Give all tokens the same value in one channel of the residual stream, as the bias of a router without one."""
    model.model.embed_tokens.weight[:, 0] = 2.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.experts.down_proj[:, 0] = 0.0
        layer.post_attention_layernorm.weight[0] = 1.0


def play(ranks: Ranks, case: Case, layout: Layout) -> list[Story]:
    options = OPTIONS | dict(dispatcher=layout.dispatcher, debug_collectives=True, collective_timeout=30)
    return worker_groups.run(
        ranks,
        layout.tp * layout.dp,
        case.timetable(layout.dp),
        folder=str(case.reference.folder),
        tp=layout.tp,
        options=options,
        max_small_tokens=layout.max_small_tokens,
    )


def updates_of(stories: Sequence[Story]) -> dict[str, list[RequestUpdate]]:
    updates: dict[str, list[RequestUpdate]] = {}
    for story in stories:
        for update in story.updates:
            updates.setdefault(update.request_id, []).append(update)
    return updates


def test_tokens_of_transformers(ranks: Ranks, case: Case) -> None:
    """Log-probabilities are those of one rank."""
    (story,) = play(ranks, case, Layout(1, 1, "local"))
    of_one_rank = updates_of([story])
    for layout in case.layouts:
        stories = play(ranks, case, layout)
        worker_groups.check_counts(stories, layout.tp, case.top_k)
        check_ways([sum(num_tokens) for num_tokens in stories[0].steps], stories[0].ways, layout.max_small_tokens)
        check_that_it_was_extreme(case, stories)
        updates = updates_of(stories)
        for index, prompt in enumerate(case.prompts):
            mine, alone = updates[str(index)], of_one_rank[str(index)]
            assert [update.token_ids[0] for update in mine] == case.reference.greedy(prompt, NUM_TOKENS), layout
            assert mine[0].logprobs[0].token_ids == alone[0].logprobs[0].token_ids
            found, expected = (torch.tensor(each[0].logprobs[0].logprobs) for each in (mine, alone))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def check_that_it_was_extreme(case: Case, stories: Sequence[Story]) -> None:
    num_replicas = len(stories[0].steps[0])
    one_token, full_batch = [0] * num_replicas, [0] * num_replicas
    one_token[ONE_TOKEN_REPLICA % num_replicas] = 1
    full_batch[-1] = FULL_BATCH
    assert tuple(one_token) in stories[0].steps
    assert tuple(full_batch) in stories[0].steps

    by_expert = sum(torch.tensor(story.computed) for story in stories)  # [steps, layers, experts]
    assert isinstance(by_expert, torch.Tensor)
    num_tokens = torch.tensor([sum(step) for step in stories[0].steps])
    match case.routing:
        case "one rank":
            chosen = by_expert[:, :, list(case.experts_of(LOADED_RANK))]
            assert torch.equal(chosen, num_tokens[:, None, None].expand_as(chosen))
        case "empty rank":
            assert not by_expert[:, :, list(case.experts_of(EMPTY_RANK))].any()
            others = [rank for rank in range(NUM_RANKS) if rank != EMPTY_RANK]
            assert all(by_expert[:, :, list(case.experts_of(rank))].any() for rank in others)
        case "every expert":
            assert torch.equal(by_expert, num_tokens[:, None, None].expand_as(by_expert))
