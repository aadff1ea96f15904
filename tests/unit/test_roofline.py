"""The roofline of a step: one case by hand, and its operations beside those of the model's parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from moeserve.bench.costs import FORMATS, step_work
from moeserve.bench.gpu import roofline
from moeserve.bench.gpu.costs import attended_positions
from moeserve.bench.gpu.launches import decode, prefill
from moeserve.bench.gpu.roofline import H100, LAUNCH_SECONDS, Case, Cost
from moeserve.step_inputs import ChunkSpan

PUBLISHED: dict[str, dict[str, Any]] = json.loads(roofline.PUBLISHED.read_text())
TESTED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())


def config_of(name: str, num_layers: int) -> dict[str, Any]:
    config = PUBLISHED[name] | {"num_hidden_layers": num_layers}
    return config | ({"layer_types": config["layer_types"][:num_layers]} if "layer_types" in config else {})


def test_shapes_are_those_that_tests_know() -> None:
    assert {name: TESTED[name] for name in PUBLISHED} == PUBLISHED


def test_decode_of_mixtral_by_hand() -> None:
    """Each of 32 layers reads 2 of 8 experts, its projections, the router in float32, and 8192 keys and values."""
    found = roofline.roofline(Case("Mixtral-8x7B", "", decode(1, 8192)), PUBLISHED["Mixtral-8x7B"])
    experts = 2 * 3 * 4096 * 14336 * 2
    projections = 4096 * (4096 + 2 * 1024) * 2 + 4096 * 4096 * 2
    layer = experts + projections + 8 * 4096 * 4 + 8192 * 2 * 8 * 128 * 2
    assert sum(found.bounds().values()) == pytest.approx((32 * layer + 32000 * 4096 * 2) / 3.35e12, rel=1e-9)
    # The attention has 32 splits of 8 heads: more programs than multiprocessors.
    (attention, *_) = found.costs["attend_split_kernel"]
    partial_sums = 32 * 32 * (128 + 2) * 4
    expected = (8192 * 2 * 8 * 128 * 2 + 32 * 128 * 2 + partial_sums) / 3.35e12
    assert attention.seconds(H100) == pytest.approx(LAUNCH_SECONDS + expected, rel=1e-9)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_products_have_the_operations_of_the_parameters(quantization: Any, tmp_path: Path) -> None:
    """Every kernel of products has its own cost, not that of a kernel that only moves its arguments."""
    config = config_of("Qwen3-30B-A3B", 3)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = roofline.roofline(Case("", "", prefill(200, 1000), quantization), config)
    work = step_work(tmp_path, num_tokens=200, num_logits=1, weights=FORMATS[quantization or "bfloat16"])
    attention = 3 * 4 * 32 * 128 * attended_positions(200, 1000, None)
    operations = sum(cost.operations for costs in found.costs.values() for cost in costs)
    assert operations == pytest.approx(work.operations + attention, rel=1e-3)


def test_experts_divided_among_ranks() -> None:
    """One of 8 ranks with 4 tokens each reads its 32 experts with the chance that one of 32 tokens chose them."""
    config = config_of("DeepSeek-V3", 4)
    found = roofline.roofline(Case("", "", decode(4, 100), "fp8", num_ranks=8), config)
    (gate_up,) = (each for each in found.costs["grouped_matmul_kernel"] if each.operations == 2 * 32 * 4096 * 7168)
    share = 1 - (1 - 8 / 256) ** 32
    assert gate_up.needed_bytes == pytest.approx(32 * share * (4096 * 7168 + 4 * 32 * 56), rel=1e-9)
    dispatch, _combine = found.costs["exchange"]  # to 3.5 of 7 other ranks, for one layer with experts
    assert dispatch.seconds(H100) - LAUNCH_SECONDS == pytest.approx(4 * 3.5 * 7168 * 2 / 450e9, rel=1e-9)


def test_states_are_read_and_written_once() -> None:
    """Two chunks have one token, and the third one is computed in tiles."""
    spans = [*decode(2, 100), ChunkSpan(2, 200, 200)]
    found = roofline.roofline(Case("", "", spans), config_of("Qwen3-Next-80B-A3B", 4))
    state = 32 * 128 * 128
    for name, num_chunks, num_tokens in (("recurrence_kernel", 2, 2), ("attend_tiles_kernel", 1, 200)):
        (cost, *others) = found.costs[name]
        assert len(others) == 2, "one of four layers has attention"
        assert cost.needed_bytes == 2 * num_chunks * state * 4
        assert cost.needed_operations == 3 * 2 * num_tokens * state


def test_losses_and_bound_are_the_expected_time() -> None:
    found = roofline.roofline(Case("", "", decode(2, 500)), config_of("gpt-oss-20b", 2))
    assert sum(found.losses().values()) + sum(found.bounds().values()) == pytest.approx(found.seconds(), rel=1e-9)
    few = Cost(3.35e6, num_programs=33)  # a microsecond on all multiprocessors
    assert few.seconds(H100) == pytest.approx(LAUNCH_SECONDS + 4e-6)
    assert few.bound(H100) == 0.0
