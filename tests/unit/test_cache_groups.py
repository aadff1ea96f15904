"""Cache groups on ranks: what networks declare, what the engine is told, and the tables of each group in a step."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from test_device_copies import CPU, CountingModel, UnpinnedCopies

from moeserve.cache_kind import CacheKind
from moeserve.distributed.groups import unconnected
from moeserve.distributed.mesh import Mesh
from moeserve.kv.layer_cache import Places
from moeserve.kv.rules import CacheGroup, CacheRules, KeepAll, KeepState, KeepWindow, groups_of
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.models.decoder import Decoder
from moeserve.models.registry import describe
from moeserve.ops.select import select_backend
from moeserve.protocol import CacheChanges, CacheStart, Registration, StepPlan
from moeserve.sampling_params import RequestParams
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.protocol import GroupFacts, Loaded
from moeserve.worker.rank_context import RankContext
from moeserve.worker.request_table import RequestTable
from moeserve.worker.step_runner import EagerSteps

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
BLOCK_SIZE, TP = 128, 2
META = torch.device("meta")
# One of each kind of cache: keys and values, windows, latent vectors, keys of an indexer, states, compressed entries.
NAMES = ["Mixtral-8x7B", "gpt-oss-20b", "DeepSeek-V2-Lite", "DeepSeek-V3.2", "Qwen3-Next-80B-A3B", "LFM2-8B-A1B",
         "Nemotron-3-Nano-30B-A3B", "DeepSeek-V4-Flash", "MiMo-V2-Flash", "Jamba-v0.1"]  # fmt: skip


def rank_of(config: dict[str, Any], folder: Path, rank: int, *, has_float8_cache: bool) -> Decoder:
    """Return the model of one of two tp ranks, without memory."""
    (folder / "config.json").write_text(json.dumps(config))
    model, groups = describe(folder).model, unconnected(Mesh(tp=TP, dp=1), rank)
    context = BuildContext(
        select_backend(META),
        groups,
        torch.bfloat16,
        META,
        has_float8_cache=has_float8_cache,
        block_size=BLOCK_SIZE,
    )
    return Decoder(model, model.place_experts(TP), TorchDispatchers("allgather", groups.ep, context), context)


@pytest.mark.parametrize(("name", "has_float8_cache"), [*((name, False) for name in NAMES), ("gpt-oss-20b", True)])
def test_caches_hold_what_networks_declare(name: str, has_float8_cache: bool, tmp_path: Path) -> None:
    """Bytes, places, and the parts of two tp ranks, which together have all of each tensor."""
    models = [rank_of(PUBLISHED[name], tmp_path, rank, has_float8_cache=has_float8_cache) for rank in range(TP)]
    rules = models[0].config.cache_rules(BLOCK_SIZE)
    tables = tuple(CacheGroup(rule, 3 + 2 * index) for index, rule in enumerate(rules.tables))
    num_places = {group.rule.kind: group.num_places for group in tables} | {CacheKind.STATE: 4}
    all_bytes: list[int] = []
    for model in models:
        caches = model.make_caches(Places(tables, num_places[CacheKind.STATE]))
        assert groups_of(items.rule for of_network in model.cache_items for items in of_network) == rules
        for of_network, cache in zip(model.cache_items, caches, strict=True):
            for items, tensors in zip(of_network, cache.tensors_of_items, strict=True):
                assert sum(tensor[0].nbytes for tensor in tensors) == items.num_bytes
                assert {len(tensor) for tensor in tensors} <= {num_places[items.rule.kind]}
                for tensor, division in zip(tensors, items.divisions, strict=bool(items.divisions)):
                    assert tensor.shape[division.axis] == sum(map(len, division.ranges))
        all_bytes.append(sum(tensor[0].nbytes for cache in caches for tensor in cache.tensors))
    assert all_bytes == [sum(model.cache_needs.block_bytes) + model.cache_needs.row_bytes for model in models]
    first, second = (
        [division for of_network in model.cache_items for items in of_network for division in items.divisions]
        for model in models
    )
    for one, other in zip(first, second, strict=True):
        covered = set(itertools.chain(*one.ranges, *other.ranges))
        assert covered == set(range(max(covered) + 1))


def test_the_largest_window_counts_in_any_order() -> None:
    small, large, state = KeepWindow(100, 16), KeepWindow(200, 16), KeepState.of_blocks(16)
    for rules in itertools.permutations([small, KeepAll(), large, state]):
        assert groups_of(rules) == CacheRules((KeepAll(), large), state)
    assert groups_of([]) == groups_of([KeepAll()]) == CacheRules()


def test_the_engine_learns_the_groups_of_ranks() -> None:
    groups = [CacheGroup(rule, 7 * n) for n, rule in enumerate((KeepWindow(100, 16), KeepState(4), KeepAll()))]
    message = msgspec.msgpack.encode(Loaded(9, other_groups=list(map(GroupFacts.of, groups))))
    assert [facts.group for facts in msgspec.msgpack.decode(message, type=Loaded).other_groups] == groups


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_step_has_the_table_of_each_group(on_gpu: bool) -> None:
    """Requests get blocks that differ between groups, at the beginning and in later plans; slots are used again."""
    chance, max_blocks, num_slots = random.Random(0), 8, 5
    block_size = CountingModel().context.block_size
    rules = CacheRules((KeepAll(), KeepWindow(5, block_size), KeepWindow(9, block_size)), KeepState(1))
    context = RankContext(mesh=Mesh(tp=1, dp=1), tp_rank=0, max_blocks=max_blocks, device=CPU, rules=rules)
    table, model = RequestTable(num_slots, max_blocks, len(rules.tables)), cast(Any, CountingModel())
    runner = ModelRunner(model, context, EagerSteps(model, []), table, appends_samples=False)
    if on_gpu:
        runner.copies = UnpinnedCopies(table, CPU)
    tables: dict[int, list[list[int]]] = {}
    for _ in range(100):
        slots = chance.sample(range(num_slots), chance.randint(1, num_slots))
        starts = [slot for slot in slots if slot not in tables or chance.random() < 0.2]
        new_blocks = []
        for slot in slots:
            num_new = chance.randint(1, 3) if slot in starts else int(len(tables[slot][0]) < max_blocks)
            added = [[chance.randrange(1000) for _ in range(num_new)] for _ in rules.tables]
            old = [[] for _ in rules.tables] if slot in starts else tables[slot]
            tables[slot] = [table + blocks for table, blocks in zip(old, added, strict=True)]
            if slot not in starts:
                new_blocks.append((slot, added))
        ends = [len(tables[slot][0]) * block_size for slot in slots]
        lengths = [chance.randint(1, end) for end in ends]
        plan = StepPlan(
            step=0,
            slots=slots,
            starts=[end - length for end, length in zip(ends, lengths, strict=True)],
            lengths=lengths,
            registrations=[
                Registration(
                    slot=slot,
                    token_ids=[0] * max_blocks * block_size,
                    num_prompt_tokens=max_blocks * block_size,
                    cache=CacheStart(tables[slot]),
                    params=RequestParams(),
                    seed=0,
                    end_token_ids=[],
                )
                for slot in starts
            ],
            cache=CacheChanges(new_blocks=new_blocks),
        )
        step = runner.build_inputs(table.apply(plan), (sum(lengths),))
        for group in range(len(rules.tables)):
            of_group = step.of_group(group)
            expected = [
                tables[slot][group][position // block_size] * block_size + position % block_size
                for slot, end, length in zip(slots, ends, lengths, strict=True)
                for position in range(end - length, end)
            ]
            assert of_group.cache_slots.tolist() == expected
            for slot, block_ids in zip(slots, of_group.block_table.tolist(), strict=True):
                assert block_ids[: len(tables[slot][group])] == tables[slot][group]
        assert step.states is not None
        assert step.states.store_S.tolist() == slots
