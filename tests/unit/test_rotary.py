"""Rotary embedding: invariants, and pairs and frequencies compared with transformers for every scaling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.beam.modeling_beam import compute_attention_scaling
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
    yarn_apply_mscale,
)

from moeserve.layers.rotary import Rotary, RotarySpec, TemperatureSpec
from moeserve.models.config_values import ConfigValues
from moeserve.ops import rows as rows_ops
from moeserve.ops.select import select_backend

CPU = torch.device("cpu")

SCALINGS: list[dict[str, Any]] = [
    dict(rope_type="linear", factor=4.0),
    dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
    dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False),
    dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=4, beta_slow=4, truncate=False),
    dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=20, beta_slow=2),
    dict(rope_type="yarn", factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.7),
    dict(rope_type="yarn", factor=40, original_max_position_embeddings=4096, mscale_all_dim=0.7),
    dict(rope_type="yarn", factor=40, original_max_position_embeddings=4096, attention_factor=1.3),
    dict(rope_type="yarn", factor=1.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0),
    dict(rope_type="yarn", factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0),
    dict(rope_type="yarn", factor=4.0),
    dict(rope_type="dynamic", factor=2.0),
]


def rotated(config: RotarySpec, heads_TNH: Tensor, *positions: int) -> Tensor:
    return rows_ops.make(select_backend(CPU)).apply_rope(
        heads_TNH.clone(), Rotary(config, CPU).at(torch.tensor(positions))
    )


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dim", [10, 6])
def test_rotation_keeps_lengths_and_products_depend_on_the_distance(dim: int, is_interleaved: bool) -> None:
    torch.manual_seed(0)
    config = RotarySpec(dim=dim, theta=10000.0, is_interleaved=is_interleaved)
    query, key = torch.randn(1, 1, 10), torch.randn(1, 1, 10)

    def product(query_position: int, key_position: int) -> float:
        rotated_query, rotated_key = rotated(config, query, query_position), rotated(config, key, key_position)
        assert rotated_query.norm() == pytest.approx(float(query.norm()), rel=1e-5)
        assert rotated_query[..., dim:].equal(query[..., dim:])
        return float((rotated_query * rotated_key).sum())

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-2)
    assert product(0, 0) == pytest.approx(float((query * key).sum()), abs=1e-5)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_pairs_equal_those_of_transformers(is_interleaved: bool) -> None:
    """Transformers moves the values of interleaved pairs, in queries and keys alike, so products are compared."""
    torch.manual_seed(0)
    query_TNH, key_TNH = torch.randn(5, 3, 8), torch.randn(5, 1, 8)
    config = RotarySpec(dim=8, theta=100.0, is_interleaved=is_interleaved)
    positions = [0, 1, 17, 400, 3]
    angles = torch.tensor(positions)[:, None] * config.frequencies()
    cosines, sines = (torch.cat([part, part], dim=-1)[None] for part in (angles.cos(), angles.sin()))
    apply = apply_rotary_pos_emb_interleave if is_interleaved else apply_rotary_pos_emb
    expected = apply(query_TNH.transpose(0, 1)[None], key_TNH.transpose(0, 1)[None], cosines, sines)
    products = expected[0] @ expected[1].transpose(-1, -2)

    query, key = rotated(config, query_TNH, *positions), rotated(config, key_TNH, *positions)
    torch.testing.assert_close(torch.einsum("tnh,skh->nts", query, key), products[0].float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 60.0, 12.0])  # the blend ends in the middle, or beyond the last pair
def test_scaled_frequencies_equal_those_of_transformers(scaling: dict[str, Any], theta: float, tmp_path: Path) -> None:
    parameters = {**scaling, "rope_theta": theta}
    reference = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=8192, rope_parameters=dict(parameters)
    )
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference, CPU)

    config = {"rope_parameters": parameters, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = ConfigValues.of_folder(tmp_path).rotary(16)
    torch.testing.assert_close(ours.frequencies(), frequencies, atol=0, rtol=1e-5)
    assert ours.attention_factor == pytest.approx(attention_factor)
    assert ours.score_factor == pytest.approx(yarn_apply_mscale(parameters, 1.0))


def test_old_and_new_spelling_are_equivalent(tmp_path: Path) -> None:
    """DeepSeek publishes rope_theta and rope_scaling with `type`; transformers 5 writes rope_parameters."""
    scaling = dict(factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096)
    config = DeepseekV3Config(rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, **scaling))
    (tmp_path / "config.json").write_text(json.dumps({"rope_parameters": config.rope_parameters}))
    present = ConfigValues.of_folder(tmp_path).rotary(64)
    (tmp_path / "config.json").write_text(
        json.dumps({"rope_theta": 10000, "rope_scaling": {"type": "yarn", **scaling}})
    )
    assert ConfigValues.of_folder(tmp_path).rotary(64) == present


def test_power_temperatures_are_those_of_transformers() -> None:
    """The positions are those of long contexts, where the factors differ much from one."""
    positions = torch.tensor([0, 7, 2047, 2048, 8191, 131071])
    config = TemperatureSpec(dim=2, weight=0.1, length=2048, offset=1, is_power=True)
    factors = config.at(positions).cosines[:, 0]
    assert float(factors[-1]) > 1.5
    torch.testing.assert_close(factors, compute_attention_scaling(positions[None])[0, 0, :, 0], atol=0, rtol=0)
