"""Models with compressed entries: prompts that begin alike share them in any layout, and give transformers' tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import SHAPES, Reference, Shape, make_reference
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config

from moeserve import LLM, SamplingParams
from moeserve.errors import SettingsError
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
SETTINGS = {"dtype": "float32", "kv_cache_memory": "8MiB", "max_model_len": 300}


@pytest.fixture(scope="module")
def prompts(reference_named: Callable[[str], Reference]) -> list[list[int]]:
    """Prompts with common beginnings, longer than many windows and blocks."""
    reference = reference_named("deepseek-v4")
    whole = reference.prompts(200, seed=5)[0]
    first = reference.clear_prompts([200, 131], NUM_TOKENS, beginning=whole[:90])
    return [*first, *reference.clear_prompts([77, 45], NUM_TOKENS)]


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
    expected = [reference.greedy(prompt, NUM_TOKENS) for prompt in prompts]
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
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config"),
        ({"kv_cache_dtype": "fp8"}, "compressed"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_what_entries_do_not_support_is_refused(
    settings: dict[str, Any], says: str, reference_named: Callable[[str], Reference]
) -> None:
    with pytest.raises(SettingsError, match=says):
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


def test_weights_as_published(tmp_path: Path) -> None:
    """Experts in MXFP4 and other matrices in fp8, with scales in E8M0, give the results of their decoded twin."""
    reference = make_reference(tmp_path / "plain", PUBLISHED_SHAPE)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    encoded, decoded = dict(plain), dict(plain)
    for name, weight in plain.items():
        if not name.endswith(tuple(f"{end}.weight" for end in ("w1", "w2", "w3", "wq_b", "wo_b"))):
            continue
        is_expert = ".experts." in name and "shared" not in name
        group = 32 if is_expert else 128
        groups = [-(-size // step) for size, step in zip(weight.shape, (1 if is_expert else 128, group), strict=True)]
        exponents = torch.randint(119, 123, groups, generator=generator, dtype=torch.uint8)
        scales = torch.exp2(exponents.float() - 127).repeat_interleave(group, dim=1)[:, : weight.shape[1]]
        if is_expert:
            codes = torch.randint(0, 16, weight.shape, generator=generator)
            values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8] * (1 - 2 * (codes // 8))
            encoded[name] = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
        else:
            scales = scales.repeat_interleave(128, dim=0)[: len(weight)]
            values = torch.randn(weight.shape, generator=generator).mul(4).to(torch.float8_e4m3fn)
            encoded[name], values = values, values.float()
        encoded[name.removesuffix("weight") + "scale"] = exponents.view(torch.float8_e8m0fnu)
        decoded[name] = values * scales
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    fp8 = dict(quant_method="fp8", fmt="e4m3", scale_fmt="ue8m0", weight_block_size=[128, 128])
    for folder, tensors, values in (
        (tmp_path / "encoded", encoded, config | dict(quantization_config=fp8)),
        (tmp_path / "decoded", decoded, config),
    ):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(values))
    assert len(encoded) > len(plain) + 12
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0, logprobs=1)
    results = []
    for folder in (tmp_path / "encoded", tmp_path / "decoded"):
        with LLM(folder, num_threads=1, **SETTINGS) as llm:
            (output,) = llm.generate(reference.prompts(50), params)
            results.append((output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs))
    assert results[0] == results[1]
