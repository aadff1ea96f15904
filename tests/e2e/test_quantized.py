"""Quantised checkpoints give the tokens of their dequantised twins, which transformers runs too.

The checkpoints are encoded by definition of the formats.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import mxfp4_checkpoints
import pytest
import torch
from float8_checkpoints import encoded_and_decoded, write
from int4_checkpoints import CONFIGS
from int4_checkpoints import encoded_and_decoded as in_int4
from reference_models import SHAPES, Reference, make_reference
from test_families import logits_of, reread

from moeserve import LLM, SamplingParams


def assert_twins(
    tmp_path: Path, original: Reference, encoded: dict, decoded: dict, quantization: Any, *, tp: int = 1
) -> None:
    """Greedy tokens of both, and of transformers running the decoded one; logits of both within 1e-4 of those."""
    write(tmp_path / "encoded", original, encoded, quantization)
    write(tmp_path / "twin", original, decoded, None)
    twin = reread(tmp_path / "twin", original, dtype=torch.float32)
    prompts = twin.prompts(1, 9, 40)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    given = []
    for folder in (tmp_path / "encoded", tmp_path / "twin"):
        with LLM(folder, dtype="float32", tensor_parallel_size=tp) as llm:
            given.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            if tp == 1:
                assert (logits_of(llm, prompts[2], 40) - twin.logits(prompts[2])).abs().max() < 1e-4
    assert given[0] == given[1] == [twin.greedy(prompt, 48) for prompt in prompts]
    assert (original.logits(prompts[2]) - twin.logits(prompts[2])).abs().max() > 1e-2  # it did lose something


@pytest.mark.parametrize(
    ("name", "larger", "block"),
    [
        ("mixtral", dict(hidden_size=136, intermediate_size=200), (128, 128)),  # which no block divides
        ("deepseek-v3", {}, (16, 24)),
        ("deepseek-v2-lite", {}, (128, 128)),  # smaller than one block
    ],
)
def test_fp8(name: str, larger: dict[str, int], block: tuple[int, int], tmp_path: Path) -> None:
    shape = SHAPES[name]
    original = make_reference(tmp_path / "original", dataclasses.replace(shape, settings=shape.settings | larger))
    encoded, decoded, quantization = encoded_and_decoded(original, block)
    num_layers = original.model.config.num_hidden_layers
    assert len(encoded) - len(decoded) >= num_layers * (4 + 3)  # attention, and the least of feed-forward networks
    assert_twins(tmp_path, original, encoded, decoded, quantization)


def test_mxfp4(tmp_path: Path) -> None:
    original = make_reference(tmp_path / "original", mxfp4_checkpoints.SHAPE)
    assert_twins(tmp_path, original, *mxfp4_checkpoints.encoded_and_decoded(original))


@pytest.mark.parametrize("kind", CONFIGS)
def test_int4(kind: str, tmp_path: Path) -> None:
    shape = SHAPES["mixtral"]
    wider = dataclasses.replace(shape, settings=shape.settings | {"hidden_size": 64, "intermediate_size": 96})
    original = make_reference(tmp_path / "original", wider)
    assert_twins(tmp_path, original, *in_int4(original, kind, 32))
