"""Experts that a rank takes over are those of a fresh load from each source, and come from the cheapest one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import Reference

from moeserve.config.facts import MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.groups import unconnected
from moeserve.distributed.mesh import Mesh
from moeserve.errors import CheckpointError
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.moe.placement.handover import hand_over
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.weights import allocate_parameters
from moeserve.models import registry
from moeserve.models.checkpoint.names import translated
from moeserve.models.checkpoint.packed_cache import PackedWeightCache
from moeserve.models.checkpoint.packed_cache_writer import wait_for_cache_writers
from moeserve.models.checkpoint.packing import packed_state
from moeserve.models.checkpoint.shards import open_checkpoint
from moeserve.models.decoder import Decoder
from moeserve.ops.select import select_backend
from moeserve.worker.weight_sources import kept_weights, packed_entry
from moeserve.worker.weight_sources.checkpoint_tensors import CheckpointTensors, choose_packing
from moeserve.worker.weight_sources.kept_weights import KeptWeights
from moeserve.worker.weight_sources.lost_experts import CheckpointExperts, LostExperts, PackedExperts, Rows
from moeserve.worker.weight_sources.packed_entry import PackedEntry
from moeserve.worker.weight_sources.source import WeightTarget, load_from

SURVIVORS = (0, 1, 3)
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": dict(dtype="float32"),
    "deepseek-v3": dict(dtype="bfloat16"),
    "gpt-oss": dict(quantization="int4"),  # experts have biases
    "qwen3-moe": dict(quantization="int8"),
}


@pytest.fixture(autouse=True)
def every_size_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeserve.models.checkpoint.packed_cache_writer.DELAY_SECONDS", 0.0)
    monkeypatch.setattr(packed_entry, "MIN_CACHED_BYTES", 0)


@dataclass
class Counted:
    """An `ExpertSource` that counts the experts that it is asked for, and those that it has."""

    source: PackedExperts | CheckpointExperts
    asked: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)

    def load(self, lost: LostExperts) -> Rows | None:
        experts = sorted({expert for each in lost.experts for expert in each})
        rows = self.source.load(lost)
        self.asked += experts
        self.given += [] if rows is None else experts
        return rows


class Ranks:
    """The ranks of a layout, without connections."""

    def __init__(
        self, folder: Path, num_ranks: int, options: dict[str, Any], placements: Sequence[Placement] = (), **place: Any
    ) -> None:
        self.facts = registry.read_facts(str(folder))
        self.config = resolve(parse_settings(options), self.facts, MachineFacts(num_cores=1))
        self.description = registry.describe(str(folder))
        self.mesh = Mesh(tp=1, dp=num_ranks)
        self.placements = tuple(placements) or self.description.model.place_experts(num_ranks, **place)

    def target(self, rank: int) -> WeightTarget:
        """Return the model of a rank, whose memory is not filled."""
        config, description = self.config, self.description
        groups, dtype, device = unconnected(self.mesh, rank), getattr(torch, config.weights.dtype), torch.device("cpu")
        context = BuildContext(
            select_backend(device, dtype), groups, dtype, device, quantization=config.weights.quantization
        )
        dispatchers = TorchDispatchers("allgather" if self.mesh.dp > 1 else "local", groups.ep, context)
        model = Decoder(description.model, self.placements, dispatchers, context.without_memory()).eval()
        stored = open_checkpoint(Path(config.weights.model_path), description.weight_format)
        checkpoint = translated(stored, description.family, description.model.num_decoder_layers)
        target = WeightTarget(config, description, self.placements, model, checkpoint)
        choose_packing(target)
        allocate_parameters(model, context)
        return target

    def loaded(self, rank: int, cache: PackedWeightCache | None = None) -> WeightTarget:
        target = self.target(rank)
        load_from([CheckpointTensors(cache)], target)
        wait_for_cache_writers()
        return target


def bytes_of(target: WeightTarget) -> dict[str, bytes]:
    return {
        name: tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in packed_state(target.model).items()
    }


def after(ranks: Ranks, folder: Path, survivors: Sequence[int], options: dict[str, Any]) -> Ranks:
    return Ranks(folder, len(survivors), options, [hand_over(each, survivors) for each in ranks.placements])


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, reference_named: Callable[[str], Reference]) -> tuple[Path, dict[str, Any]]:
    return reference_named(request.param).folder, MODELS[request.param]


@torch.inference_mode()
def test_each_source_that_is_missing_is_replaced_by_the_next_one(
    model: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, options = model
    before = Ranks(folder, 4, options)
    cache = PackedWeightCache(tmp_path, 2**30)
    entry = before.loaded(2, cache)  # the rank that is lost
    lost = sorted({*before.placements[0].logical_of_slot[2]})
    for is_cached in (True, False):
        taken: list[int] = []
        for rank, survivor in enumerate(SURVIVORS):
            fresh = after(before, folder, SURVIVORS, options)
            packed, stored = Counted(PackedExperts(cache)), Counted(CheckpointExperts())
            kept, target = before.loaded(survivor), fresh.target(rank)
            was = bytes_of(kept)
            load_from([KeptWeights(kept, [packed, stored])], target)
            assert bytes_of(target) == bytes_of(fresh.loaded(rank))
            assert bytes_of(kept) == was  # so that it can be a source again
            assert stored.given == ([] if is_cached else packed.asked)
            taken += packed.asked
        assert sorted(taken) == lost  # each by one rank
        cache.remove(entry.key)


@torch.inference_mode()
def test_experts_that_a_survivor_has_are_read_from_nowhere(reference_named: Callable[[str], Reference]) -> None:
    folder, options = reference_named("mixtral").folder, MODELS["mixtral"]
    before = Ranks(folder, 2, options, num_redundant=registry.describe(str(folder)).model.num_experts)
    fresh, kept = after(before, folder, [1], options), before.loaded(1)
    target = fresh.target(0)
    load_from([KeptWeights(kept, [])], target)  # without sources of experts
    assert bytes_of(target) == bytes_of(fresh.loaded(0))


@torch.inference_mode()
def test_ranks_are_left_out_one_after_the_other(model: tuple[Path, dict[str, Any]]) -> None:
    folder, options = model
    ranks, own = Ranks(folder, 4, options), 2
    kept = ranks.loaded(own)
    for survivors in ((0, 2, 3), (1, 2), (0,)):  # of those that are left
        ranks = after(ranks, folder, survivors, options)
        own = survivors.index(own)
        target = ranks.target(own)
        load_from([KeptWeights(kept, [CheckpointExperts()])], target)
        assert bytes_of(target) == bytes_of(ranks.loaded(own))
        kept = target


@torch.inference_mode()
def test_a_damaged_entry_is_removed_and_not_used(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    folder, options = reference_named("mixtral").folder, MODELS["mixtral"]
    before, cache = Ranks(folder, 2, options), PackedWeightCache(tmp_path, 2**30)
    entry = before.loaded(0, cache)
    (path,) = tmp_path.glob("*.safetensors")
    with path.open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")  # behind the header
        file.seek(start)
        file.write(b"\xff" * (path.stat().st_size - start))
    fresh = after(before, folder, [1], options)
    target = fresh.target(0)
    load_from([KeptWeights(before.loaded(1), [PackedExperts(cache), CheckpointExperts()])], target)
    assert bytes_of(target) == bytes_of(fresh.loaded(0))
    assert cache.load(entry.key) is None


@torch.inference_mode()
def test_experts_that_do_not_fit_are_refused(
    reference_named: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options = reference_named("mixtral").folder, MODELS["mixtral"]
    before = Ranks(folder, 2, options)
    kept, target = before.loaded(1), after(before, folder, [1], options).target(0)
    was = bytes_of(kept)
    monkeypatch.setattr(kept_weights, "free_bytes", lambda config: 2**10)
    with pytest.raises(CheckpointError, match=r"do not fit.* 1\.00 KiB are free"):
        load_from([KeptWeights(kept, [CheckpointExperts()])], target)
    assert bytes_of(kept) == was


@torch.inference_mode()
def test_a_start_uses_the_cache_before_the_checkpoint(
    reference_named: Callable[[str], Reference], tmp_path: Path, num_loads: list[int]
) -> None:
    ranks, cache = Ranks(reference_named("mixtral").folder, 2, MODELS["mixtral"]), PackedWeightCache(tmp_path, 2**30)
    found = []
    for num_expected in (1, 1, 2):
        target = ranks.target(1)
        load_from([PackedEntry(cache), CheckpointTensors(cache)], target)
        wait_for_cache_writers()
        found.append(bytes_of(target))
        assert num_loads == [num_expected]
        if len(found) == 2:
            cache.remove(target.key)
    assert found[0] == found[1] == found[2]
