"""Runs whole texts through a model of one rank, without an engine: for measurements of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moeserve.config.engine_config import EngineConfig
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.kv.layer_cache import Places
from moeserve.models.rank_model import RankModel
from moeserve.protocol import CacheStart, Registration, StepPlan
from moeserve.sampling_params import RequestParams
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.rank_context import RankContext
from moeserve.worker.request_table import RequestTable
from moeserve.worker.step_runner import EagerSteps


@torch.inference_mode()
def hidden_states(model: RankModel, config: EngineConfig, texts: Sequence[list[int]]) -> Iterator[Tensor]:
    """Yield the hidden states [T, D] of all tokens of each text, given as token ids. A text is one step."""
    num_blocks = -(-max(map(len, texts)) // config.cache.block_size)
    rules = model.cache_needs.rules
    steps = EagerSteps(model, model.make_caches(Places.equal(rules, num_blocks)))
    context = RankContext(
        mesh=groups_of_one_rank().mesh,
        tp_rank=0,
        max_blocks=num_blocks,
        device=torch.device(config.compute.device),
        rules=rules,
    )
    table = RequestTable(1, num_blocks, len(rules.tables))
    runner = ModelRunner(model, context, steps, table)
    for text in texts:
        prompt = Registration(
            slot=0,
            token_ids=text,
            num_prompt_tokens=len(text),
            cache=CacheStart([list(range(num_blocks))] * len(rules.tables)),
            params=RequestParams(),
            seed=0,
            end_token_ids=[],
        )
        plan = StepPlan(step=0, slots=[0], starts=[0], lengths=[len(text)], registrations=[prompt])
        yield steps(runner.build_inputs(table.apply(plan), (len(text),))).hidden_TD
