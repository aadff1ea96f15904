"""`moeserve quantize`: the copy that it writes, and the importances that it measures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from reference_models import SHAPES, Reference, make_reference
from safetensors.torch import load_file
from tiny_model import save_tiny_model

from moeserve import LLM, SamplingParams
from moeserve.api.quantize import quantize, write_copy
from moeserve.cli import main
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.errors import CheckpointError, SettingsError
from moeserve.models import registry
from moeserve.ops.native import native_kernels
from moeserve.worker import importances
from moeserve.worker.loading import load_model
from moeserve.worker.texts import hidden_states

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels are not built")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 256}  # all chunks of inputs have whole blocks


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    shape = SHAPES["mixtral"]
    wider = dataclasses.replace(shape, settings=shape.settings | SIZES)
    return make_reference(tmp_path_factory.mktemp("original"), wider)


def results(folder: Path, prompts: list[list[int]], **settings: str) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    with LLM(folder, packed_cache=0, **settings) as llm:  # type: ignore[arg-type]
        outputs = [output.outputs[0] for output in llm.generate(prompt_token_ids=prompts, sampling_params=params)]
    return [(each.token_ids, [next(iter(one.values())).logprob for one in each.logprobs or []]) for each in outputs]


def test_a_copy_gives_the_results_of_int4(original: Reference, tmp_path: Path) -> None:
    """Exactly, without importances: the file holds the blocks that loading chooses. Also on two ranks."""
    prompts = original.prompts(1, 9, 40)
    with LLM(original.folder, quantization="int4", dtype="bfloat16") as llm:
        config = llm.config
    write_copy(registry.describe(original.folder), config, {}, tmp_path / "copy", show_progress=False)
    names = load_file(tmp_path / "copy" / "model-00001.safetensors")
    for name in ("self_attn.o_proj", "block_sparse_moe.experts.1.w1", "block_sparse_moe.experts.1.w2"):
        assert names[f"model.layers.1.{name}.weight_blocks"].dtype == torch.uint8
    expected = results(original.folder, prompts, quantization="int4", dtype="bfloat16")
    assert results(tmp_path / "copy", prompts, dtype="bfloat16") == expected
    assert results(tmp_path / "copy", prompts, dtype="bfloat16", tensor_parallel_size=2) == expected  # type: ignore[arg-type]
    assert results(original.folder, prompts, dtype="bfloat16") != expected


def test_importances_are_mean_squares_of_inputs(original: Reference) -> None:
    """Those of an output projection as transformers computes its inputs, besides what all importances have added."""
    with LLM(original.folder, dtype="float32") as llm:
        config = llm.config
    model = load_model(config, groups_of_one_rank(), show_progress=False).model
    texts = original.prompts(300, 200)
    measured = importances.measure(model, hidden_states(model, config, texts))
    squares: list[torch.Tensor] = []
    module = original.model.model.layers[1].self_attn.o_proj
    handle = module.register_forward_pre_hook(lambda _, inputs: squares.append(inputs[0].flatten(0, -2).square()))
    for text in texts:
        original.model(torch.tensor([text]))
    handle.remove()
    mean_I = torch.cat(squares).mean(0)
    (name,) = (each for each in measured if each.startswith("registered_layers.1.") and each.endswith("output.weights"))
    torch.testing.assert_close(measured[name][0], mean_I + 0.01 * mean_I.mean(), rtol=1e-4, atol=1e-9)
    (name,) = (each for each in measured if each.startswith("registered_layers.0.") and each.endswith("experts.down"))
    assert measured[name].shape == (original.model.config.num_local_experts, 512)
    assert len({row.sum().item() for row in measured[name]}) > 1  # each expert has inputs of its own


def test_the_command_writes_a_copy_with_other_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From texts that the model writes, and from a file."""
    model = save_tiny_model(tmp_path / "model")
    (tmp_path / "text").write_text("To bake bread, you need flour, water and salt.")
    for name, options in (("own", []), ("file", ["--text", str(tmp_path / "text")])):
        out = tmp_path / name
        assert main(["quantize", str(model), "--out", str(out), "--tokens", "64", *options]) == 0
        assert capsys.readouterr().out.strip() == str(out)
        with LLM(out) as llm:
            assert llm.config.weights.quantization == "int4"
            (output,) = llm.generate("To bake", SamplingParams(max_tokens=4))
            assert len(output.outputs[0].token_ids) > 0


def test_wrong_arguments(original: Reference, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    (tmp_path / "short").write_text("")
    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        (dict(out=tmp_path / "used"), CheckpointError, "used"),
        (dict(num_tokens=3), SettingsError, "num_tokens=3"),
        (dict(text=tmp_path / "missing"), SettingsError, "missing"),
        (dict(name=tmp_path / "nowhere"), CheckpointError, "nowhere"),
    ]
    for arguments, kind, message in cases:
        given = {"name": original.folder, "out": tmp_path / "out"} | arguments
        with pytest.raises(kind, match=message):
            quantize(**given, show_progress=False)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
