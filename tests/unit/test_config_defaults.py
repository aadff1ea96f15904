"""Missing keys of a config.json have the defaults of transformers."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from config_defaults import LEFT_OUT, table
from huggingface_hub.errors import StrictDataclassError
from reference_models import SHAPES, in_the_style_of_the_hub

from moeserve.errors import CheckpointError
from moeserve.models import config_defaults
from moeserve.models.model_config import ModelSpec
from moeserve.models.registry import describe, read_facts

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())

# Published names that transformers' own class does not read
NOT_READ_BY_TRANSFORMERS = [("mimo-v2-flash-odd", True), ("minimax", True)]


def described(tmp_path: Path, config: dict[str, Any]) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return describe(tmp_path).model


def test_defaults_are_those_of_transformers() -> None:
    assert json.loads(config_defaults.PATH.read_text()) == json.loads(json.dumps(table()))


# Values without which transformers' config class gives something else than its model or the file has.
EXCEPTIONS = {
    # A size in the file that depends on the missing one contradicts the default.
    *((name, "head_dim") for name in ("deepseek-v4", "deepseek-v4-odd", "ling3", "ling3-unbounded")),
    *((name, "qk_rope_head_dim") for name in ("ling3", "ling3-unbounded")),
    # Without a list, all layers of Granite 4 are recurrent, and moeserve needs one with attention.
    *((name, "layer_types") for name in ("granite-hybrid", "granite-hybrid-rope")),
    # If the language model's config has no such flag, that of the whole model decides.
    *((name, "tie_word_embeddings") for name in ("kimi-k25-tied", "ernie-vl-odd")),
    # The theta of published configs is in attn_config, where transformers does not read it.
    *((name, key) for name in ("dbrx", "dbrx-odd") for key in ("attn_config", "rope_parameters")),
}


@pytest.mark.slow_but("mixtral", "deepseek-v3", "qwen3", "gpt-oss")
@pytest.mark.parametrize("is_of_hub", [False, True], ids=["saved", "hub"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_a_config_without_a_value_is_read_as_transformers_reads_it(name: str, is_of_hub: bool, tmp_path: Path) -> None:
    """Each key in turn is removed, and set to null.

    The config class of transformers reads the result, and all values that it has then must give the same shape.
    """
    saved = json.loads(json.dumps(SHAPES[name].config().to_dict(), default=str)) | {"dtype": "float32"}
    config = in_the_style_of_the_hub(copy.deepcopy(saved)) if is_of_hub else saved
    text_class = type(SHAPES[name].config().get_text_config())

    def read(outer: dict[str, Any], text: dict[str, Any]) -> ModelSpec | None:
        """Return the shape, or None if the config is refused."""
        values = outer | {"text_config": text} if "text_config" in outer else text
        try:
            model: ModelSpec = described(tmp_path, values)
        except CheckpointError:
            return None
        # A checkpoint has MTP layers only if its config says so, unlike the defaults.
        return dataclasses.replace(model, num_skipped_layers=0, draft=None)

    def completed(text: dict[str, Any]) -> dict[str, Any] | None:
        """Return the text part with transformers' values, or None if transformers refuses it."""
        try:
            values = text_class.from_dict(copy.deepcopy(text)).to_dict()
        except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
            return None
        beside = {"architectures": saved["architectures"]}
        return json.loads(json.dumps(values, default=str)) | {"dtype": "float32"} | beside

    given = config.get("text_config", config)
    whole = completed(given)
    if whole is None or read(saved, whole) != read(config, given):
        assert (name, is_of_hub) in NOT_READ_BY_TRANSFORMERS
        return
    num_compared = 0
    for key in given.keys() - LEFT_OUT - {"torch_dtype", "model_type", "transformers_version", "rope_theta"}:
        for changed in ({k: v for k, v in given.items() if k != key}, given | {key: None}):
            whole = completed(changed)
            if whole is not None and (name, key) not in EXCEPTIONS:
                assert read(config, changed) == read(saved, whole), (key, changed.get(key))
                num_compared += 1
    assert num_compared > 10


def test_the_rotated_part_of_a_head_is_half_where_glm_does_not_say(tmp_path: Path) -> None:
    config = {name: value for name, value in PUBLISHED["GLM-4.5"].items() if name != "partial_rotary_factor"}
    assert (
        described(tmp_path, config).layers[0].networks[0].rotary.dim
        == 64
        == transformers.Glm4MoeConfig().rope_parameters["partial_rotary_factor"] * config["head_dim"]
    )


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    """As Qwen3's model card has it: rope_scaling is added, and max_position_embeddings stays."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-30B-A3B"] | {"rope_scaling": scaling}))
    assert read_facts(tmp_path).max_position_embeddings == 131072


def test_two_names_for_one_number_must_agree(tmp_path: Path) -> None:
    config = PUBLISHED["Qwen3-30B-A3B"]
    assert described(tmp_path, config | {"num_local_experts": 128}) == described(tmp_path, config)
    with pytest.raises(CheckpointError, match="num_local_experts=64 contradicts num_experts=128"):
        described(tmp_path, config | {"num_local_experts": 64})


@pytest.mark.parametrize(
    ("name", "key"),
    [("deepseek-v3", "norm_topk_prob"), ("deepseek-v3", "rope_interleave"), ("mistral4", "norm_topk_prob")],
)
def test_null_means_false_as_in_transformers(name: str, key: str, tmp_path: Path) -> None:
    config = SHAPES[name].config()
    config._experts_implementation = config._attn_implementation = "eager"  # others refuse odd widths
    tokens = torch.arange(3, 40)[None]
    logits, models = [], []
    for value in (None, False, True):
        setattr(config, key, value)
        torch.manual_seed(0)
        model = getattr(transformers, SHAPES[name].architecture)(config).eval()
        with torch.no_grad():
            logits.append(model(tokens).logits)
        models.append(described(tmp_path, json.loads(json.dumps(config.to_dict(), default=str)) | {"dtype": "float32"}))
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert models[0] == models[1] != models[2]


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        (dict(architectures=None), True),
        (dict(architectures=["MixtralForCausalLM", "MixtralModel"]), True),
        (dict(architectures=["MixtralModel"]), True),
        (dict(architectures=["MixtralForSequenceClassification"]), False),
        (dict(architectures=[], model_type="llama"), False),
        (dict(architectures=[7]), False),
    ],
)
def test_names_of_classes(changes: dict[str, Any], is_same: bool, tmp_path: Path) -> None:
    config = PUBLISHED["Mixtral-8x7B"] | {"model_type": "mixtral"}
    if is_same:
        assert described(tmp_path, config | changes) == described(tmp_path, config)
    else:
        with pytest.raises(CheckpointError, match="architecture"):
            described(tmp_path, config | changes)


def test_lists_and_numbers_name_the_layers_with_experts(tmp_path: Path) -> None:
    config = PUBLISHED["DeepSeek-V3"]
    flags = [0] * 3 + [1] * 58
    assert described(tmp_path, config | {"moe_layer_freq": flags}) == described(tmp_path, config)
    shape = described(tmp_path, config | {"moe_layer_freq": [1, 0] * 30 + [1], "first_k_dense_replace": None})
    assert [bool(layer.moes) for layer in shape.layers] == [True, False] * 30 + [True]
    for wrong in ([0, 1], [2] * 61, 2):
        with pytest.raises(CheckpointError, match="moe_layer_freq"):
            described(tmp_path, config | {"moe_layer_freq": wrong})


@pytest.mark.parametrize("written", ["torch.bfloat16", "bfloat16"])
def test_dtypes_as_torch_prints_them(written: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Mixtral-8x7B"] | {"torch_dtype": written}))
    assert describe(tmp_path).dtype == "bfloat16"
