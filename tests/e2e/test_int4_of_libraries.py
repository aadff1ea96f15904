"""Checkpoints that gptqmodel and auto-round wrote: the folder int4_of_libraries, whose README says how.

Names, zero points and the order of nibbles are the libraries' own, as are the digests of the dequantised weights.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from moeserve import LLM, SamplingParams
from moeserve.layers.rows import whole
from moeserve.models import registry
from moeserve.models.checkpoint.loading import Destinations, load_weights
from moeserve.models.checkpoint.shards import open_checkpoint

FOLDER = Path(__file__).with_name("int4_of_libraries")
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint in float32, by the names that gptqmodel gives them."""
    checkpoint = open_checkpoint(folder, registry.describe(folder).weight_format)
    memories = {name: torch.empty(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    places = Destinations({name: [whole(memory)] for name, memory in memories.items()})
    load_weights(checkpoint, places, show_progress=False)
    return {name.replace("block_sparse_moe", "mlp"): memory for name, memory in memories.items()}


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_the_library_dequantises(name: str) -> None:
    weights = weights_of(FOLDER / name)
    digests = json.loads((FOLDER / name / "digests.json").read_text())
    assert len(digests) == 4 + 2 * 3
    for of_weight, digest in digests.items():
        rounded = (weights[of_weight].half() + 0.0).numpy()  # the library multiplies in float16, and has no -0.0
        assert hashlib.sha256(rounded.tobytes()).hexdigest() == digest, of_weight


def twin_of(folder: Path, weights: dict[str, Tensor]) -> Any:
    """Return transformers' model with the dequantised weights."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    stack = [f"model.layers.0.mlp.experts.{expert}" for expert in range(2)]
    of_experts = {
        "gate_up_proj": [torch.cat([weights[f"{e}.gate_proj.weight"], weights[f"{e}.up_proj.weight"]]) for e in stack],
        "down_proj": [weights[f"{expert}.down_proj.weight"] for expert in stack],
    }
    tensors = {name: weight for name, weight in weights.items() if ".experts." not in name}
    tensors |= {f"model.layers.0.mlp.experts.{name}": torch.stack(parts) for name, parts in of_experts.items()}
    (architecture,) = config["architectures"]
    model_config = transformers.AutoConfig.for_model(**config)
    model = getattr(transformers, architecture)(model_config).float().eval()
    model.load_state_dict(tensors)
    return model


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_are_those_of_the_dequantised_twin(name: str) -> None:
    folder = FOLDER / name
    expected_TV = twin_of(folder, weights_of(folder))(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=32)
    with LLM(folder, dtype="float32") as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    for row, expected_V in zip(output.prompt_logprobs[1:], expected_TV, strict=False):
        assert row is not None
        for token, found in row.items():
            assert found.logprob == pytest.approx(float(expected_V[token]), abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_library_is_named_as_in_the_config(name: str) -> None:
    method = json.loads((FOLDER / name / "config.json").read_text())["quantization_config"]["quant_method"]
    assert registry.read_facts(FOLDER / name).quantization == method
