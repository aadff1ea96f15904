"""Models with compressed entries: prompts that begin alike share them in any layout, and give transformers' tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mxfp4_checkpoints import DEEPSEEK_V4, encoded_like_deepseek_v4
from reference_models import SHAPES, Reference, Shape, make_reference
from safetensors.torch import load_file, save_file
from test_mxfp4_weights import values_in_mxfp4, weights_of_rank
from test_steps_in_flight import NGRAM
from transformers import DeepseekV4Config

from moeserve import LLM, SamplingParams
from moeserve.errors import CheckpointError, SettingsError
from moeserve.models.inspection import inspect
from moeserve.models.registry import describe

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Matrices of whole groups, and of more than one block
PUBLISHED_SHAPE = Shape(
    "DeepseekV4",
    SHAPES["deepseek-v4"].settings
    | dict(hidden_size=160, intermediate_size=64, num_hidden_layers=2, head_dim=64)
    | dict(layer_types=SHAPES["deepseek-v4"].settings["layer_types"][:2], mlp_layer_types=["hash_moe", "moe"]),
)
SETTINGS = {"dtype": "float32", "kv_cache_memory": "8MiB", "max_model_len": 300, "block_size": 16}


@pytest.fixture(scope="module")
def prompts(reference_named: Callable[[str], Reference]) -> list[list[int]]:
    """Prompts with common beginnings, longer than many windows and blocks."""
    reference = reference_named("deepseek-v4")
    whole = reference.prompts(200, seed=5)[0]
    first = reference.clear_prompts([200, 131], NUM_TOKENS, beginning=whole[:90])
    return [*first, *reference.clear_prompts([77, 45], NUM_TOKENS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"max_num_batched_tokens": 64},
        {"max_num_seqs": 2, "max_num_batched_tokens": 7, "block_size": 4},
        {"max_num_batched_tokens": 33, "block_size": 128, "kv_host_memory": "1MiB"},
        {"max_num_batched_tokens": 70, "kv_cache_memory": "700KiB", "max_model_len": 210},
    ],
    ids=lambda layout: "-".join(layout),
)
def test_layouts(layout: dict[str, int], prompts: list[list[int]], reference_named: Callable[[str], Reference]) -> None:
    """Two rounds of prompts, of which the second finds blocks of the first."""
    reference = reference_named("deepseek-v4")
    expected = reference.continuations(prompts, NUM_TOKENS)
    with LLM(reference.folder, num_threads=1, **SETTINGS | layout) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        if len(layout) == 1:  # otherwise other requests have taken the blocks of windows
            cached = [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
            assert [output.num_cached_tokens for output in outputs] == cached


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"block_size": 6}, "multiple of 4"),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, r"MTP.*method='ngram'"),
        ({"speculative_config": NGRAM, "data_parallel_size": 2, "overlap_decode_tokens": 4}, "overlap_decode_tokens"),
        ({"kv_cache_dtype": "fp8"}, "compressed"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_what_entries_do_not_support_is_refused(
    settings: dict[str, Any], says: str, reference_named: Callable[[str], Reference]
) -> None:
    with pytest.raises((SettingsError, CheckpointError), match=says):
        LLM(reference_named("deepseek-v4").folder, **settings)


def test_published_configs_read_like_those_of_transformers(tmp_path: Path) -> None:
    """Published configs list the tokens of an entry; transformers names types of layers, and nests frequencies."""
    published = json.loads((Path(__file__).parents[1] / "unit" / "published_configs.json").read_text())
    for name in ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro"):
        config = published[name]
        own = DeepseekV4Config(**copy.deepcopy(config)).to_dict() | dict(architectures=config["architectures"])
        for folder, values in ((tmp_path / "hub", config), (tmp_path / "own", own)):
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(values))
        assert describe(tmp_path / "hub").model == describe(tmp_path / "own").model


def test_weights_as_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Experts in MXFP4 and other matrices in fp8 are those of the decoded twin. In bfloat16, all stay as stored."""
    reference = make_reference(tmp_path / "plain", PUBLISHED_SHAPE)
    encoded, decoded = encoded_like_deepseek_v4(load_file(tmp_path / "plain" / "model.safetensors"))
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    for folder, tensors, values in (
        (tmp_path / "encoded", encoded, config | dict(quantization_config=DEEPSEEK_V4, expert_dtype="fp4")),
        (tmp_path / "decoded", decoded, config),
    ):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(values))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0, logprobs=1)
    results = []
    for folder in (tmp_path / "encoded", tmp_path / "decoded"):
        with LLM(folder, num_threads=1, **SETTINGS) as llm:
            (output,) = llm.generate(reference.prompts(50), params)
            results.append((output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs))
    assert results[0] == results[1]

    exact, kept = (weights_of_rank(tmp_path / name, keeps_mxfp4=name == "encoded") for name in ("decoded", "encoded"))
    experts = [name for name in kept if ".experts." in name]
    assert len(experts) == 4
    for name in experts:
        assert torch.equal(values_in_mxfp4(kept[name]), exact[name].open.weight_eOI.double()), name
    with LLM(tmp_path / "encoded", num_threads=1, **SETTINGS | {"dtype": "bfloat16"}) as llm:
        assert llm.core.config.weights.quantization == "mxfp4"  # type: ignore[attr-defined]
        (output,) = llm.generate(reference.prompts(50), params)
    assert len(output.outputs[0].token_ids) == 4
    assert "stay in mxfp4" in caplog.text
    parts = {part.name: part.dtype for part in inspect(tmp_path / "encoded", "bfloat16").parts}
    assert (parts["routed experts"], parts["shared experts"]) == ("mxfp4", "fp8")
