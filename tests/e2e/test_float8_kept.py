"""FP8 checkpoints stay in FP8 in the memory of a CPU, with the bytes of the dequantised checkpoint."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from float8_checkpoints import LARGE, encoded_and_decoded, write
from reference_models import SHAPES, Reference, make_reference
from safetensors.torch import load_file, save_file
from test_families import logits_of

from moeserve import LLM, CheckpointError, SamplingParams, cli
from moeserve.models.checkpoint import packed_cache_writer
from moeserve.models.checkpoint.packed_cache_writer import wait_for_cache_writers
from moeserve.models.checkpoint.packing import packed_state, weights_of
from moeserve.models.inspection import as_text, inspect
from moeserve.worker.weight_sources import checkpoint_tensors, packed_entry

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
# Widths of whole groups of 32 inputs. Some begin or end inside of a block, also those of ranks.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3-moe": dict(
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=768,
        initializer_range=0.08,
        vocab_size=256,
    ),
    "deepseek-v3": LARGE["deepseek-v3"] | dict(q_lora_rank=160, moe_intermediate_size=160, vocab_size=256),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A checkpoint in FP8, and the same dequantised to bfloat16."""

    original: Reference
    encoded: Path
    decoded: Path


@pytest.fixture(scope="module", params=SIZES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    shape = SHAPES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    original = make_reference(
        folder / "original", dataclasses.replace(shape, settings=shape.settings | SIZES[request.param])
    )
    encoded, decoded, quantization = encoded_and_decoded(original, (128, 128))
    write(folder / "encoded", original, in_bfloat16(encoded), quantization)
    write(folder / "decoded", original, in_bfloat16(decoded), None)
    return Pair(original, folder / "encoded", folder / "decoded")


def in_bfloat16(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Round all weights but scales and those that must be exact."""
    return {
        name: tensor.bfloat16() if tensor.dtype == torch.float32 and not name.endswith("scale_inv") else tensor
        for name, tensor in tensors.items()
    }


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def model_of(llm: LLM) -> Any:
    return llm.core.replicas[0].executor.worker.runner.model  # type: ignore[attr-defined]


def num_bytes_in(llm: LLM) -> int:
    model = model_of(llm)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in packed_state(model).values()}.values())


def outputs(path: Path, prompts: list[list[int]], **options: Any) -> list[Any]:
    with LLM(path, dtype="bfloat16", **{"packed_cache": 0, **options}) as llm:
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in llm.generate(prompts, GREEDY)]


def test_logits_are_those_of_the_dequantised_checkpoint(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """All encoded weights stay, but for the maps of latent attention that are turned. Their size is counted before."""
    prompt = pair.original.prompts(100)[0]
    logits, kept, others, sizes = [], set(), set(), []
    for path in (pair.encoded, pair.decoded):
        with LLM(path, dtype="bfloat16", packed_cache=0) as llm:
            logits.append(logits_of(llm, prompt, 40))
            sizes.append(num_bytes_in(llm))
            for name, weights in weights_of(model_of(llm)).items():
                (kept if weights.stored_rows else others).add(name.split(".network.")[-1])
    assert torch.equal(logits[0], logits[1])
    assert {"experts.gate_up", "experts.down", "output.weights"} <= kept, (kept, others)
    found = inspect(pair.encoded, "bfloat16")
    assert "fp8 in blocks of 128 x 128, kept in memory" in as_text(found)
    assert found.weight_bytes == sizes[0]
    assert cli.main(["plan", str(pair.encoded), "--ranks", "1", "--dtype", "bfloat16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"][0]["weight_bytes"] == sizes[0]
    stored = [folder / "model.safetensors" for folder in (pair.encoded, pair.decoded)]
    assert sizes[0] < stored[0].stat().st_size * 1.1 < stored[1].stat().st_size


@pytest.mark.parametrize("layout", [dict(tensor_parallel_size=2), dict(data_parallel_size=2)], ids=["tp", "dp"])
def test_layouts_have_the_bytes_of_one_rank(pair: Pair, layout: dict[str, int]) -> None:
    prompts = pair.original.prompts(1, 9, 40)
    assert outputs(pair.encoded, prompts, **layout) == outputs(pair.decoded, prompts)


def test_a_start_from_packed_weights_has_the_same_bytes(
    pair: Pair, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = pair.original.prompts(9)
    expected = outputs(pair.encoded, prompts)
    monkeypatch.setattr(packed_entry, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(packed_cache_writer, "DELAY_SECONDS", 0.0)
    with LLM(pair.encoded, dtype="bfloat16"):
        wait_for_cache_writers()
    (file,) = (cache / "packed").glob("*.safetensors")
    assert file.stat().st_size < (pair.decoded / "model.safetensors").stat().st_size
    monkeypatch.setattr(checkpoint_tensors, "load_weights", None)
    assert outputs(pair.encoded, prompts, packed_cache="8GiB") == expected


def test_quantising_has_the_bytes_of_the_dequantised_checkpoint(pair: Pair) -> None:
    prompts = pair.original.prompts(9)
    assert outputs(pair.encoded, prompts, quantization="int4") == outputs(pair.decoded, prompts, quantization="int4")


@pytest.mark.parametrize(
    ("damage", "says"), [(lambda s: s * torch.inf, "not finite"), (lambda s: s[:1], r"has shape \[1, 2\]")]
)
def test_damaged_scales_are_refused(
    damage: Callable[[torch.Tensor], torch.Tensor], says: str, pair: Pair, tmp_path: Path
) -> None:
    tensors = load_file(pair.encoded / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight_scale_inv"))
    tensors[name] = damage(tensors[name]).contiguous()
    broken = shutil.copytree(pair.encoded, tmp_path / "broken")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj\.weight.*" + says):
        outputs(broken, [[1]])
