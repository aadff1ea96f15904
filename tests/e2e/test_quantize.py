"""`moeserve quantize`: the copy that it writes, and the importances that it measures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
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
from moeserve.models.checkpoint.packing import weights_of
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


def test_a_copy_has_the_least_errors_by_its_importances(original: Reference, tmp_path: Path) -> None:
    """The blocks of an output projection are dequantised by the gguf package."""
    with LLM(original.folder, quantization="int4", dtype="bfloat16") as llm:
        config = llm.config
    description, errors = registry.describe(original.folder), []
    generator = torch.Generator().manual_seed(3)
    model = load_model(config, groups_of_one_rank(), show_progress=False).model
    given = {
        name: torch.rand(weights.shape[0], weights.shape[2], generator=generator) ** 4 + 0.01
        for name, weights in weights_of(model).items()
    }
    (name,) = (each for each in given if each.startswith("registered_layers.1.") and each.endswith("output.weights"))
    stored = "model.layers.1.self_attn.o_proj.weight"
    weight_OI = load_file(original.folder / "model.safetensors")[stored].float()
    for place, measured in enumerate(({}, given)):
        out = tmp_path / str(place)
        write_copy(description, config, measured, out, show_progress=False)
        blocks = load_file(out / "model-00001.safetensors")[f"{stored}_blocks"].numpy()
        values_OI = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q5_K))[:, : weight_OI.shape[1]]
        errors.append(((values_OI - weight_OI).square() * given[name]).sum().item())
    assert errors[1] < 0.95 * errors[0]


def test_importances_are_mean_squares_of_inputs(original: Reference) -> None:
    """Those of an output projection as transformers computes its inputs, besides what all importances have added."""
    with LLM(original.folder, dtype="float32") as llm:
        config = llm.config
    model = load_model(config, groups_of_one_rank(), show_progress=False).model
    texts = original.prompts(300, 200)
    measured = importances.measure(model, hidden_states(model, config, texts))
    squares: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []  # the squares of the inputs of each expert, by call
    layer = original.model.model.layers[1]
    (experts,) = (module for module in layer.modules() if type(module).__name__ == "MixtralExperts")
    num_experts = original.model.config.num_local_experts

    def look_at_experts(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        rows_TI, experts_TK = inputs[0].double(), inputs[1]
        is_chosen_eT = torch.stack([(experts_TK == expert).any(1) for expert in range(num_experts)])
        chosen.append(torch.cat([is_chosen_eT.double() @ rows_TI.square(), is_chosen_eT.sum(1, keepdim=True)], dim=1))

    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, inputs: squares.append(inputs[0].flatten(0, -2).square())
        ),
        experts.register_forward_pre_hook(look_at_experts),
    ]
    with torch.inference_mode():
        for text in texts:
            original.model(torch.tensor([text]))
    for handle in handles:
        handle.remove()
    mean_I = torch.cat(squares).mean(0)
    (name,) = (each for each in measured if each.startswith("registered_layers.1.") and each.endswith("output.weights"))
    torch.testing.assert_close(measured[name][0], mean_I + 0.01 * mean_I.mean(), rtol=1e-4, atol=1e-9)
    # Each expert has the mean of its own rows and of 256 that are the mean of all experts' rows.
    of_experts_eN = torch.stack(chosen).sum(0)
    sums_eI, counts_e1 = of_experts_eN[:, :-1], of_experts_eN[:, -1:]
    mean_eI = (sums_eI + 256 * sums_eI.sum(0) / counts_e1.sum()) / (counts_e1 + 256)
    (name,) = (each for each in measured if each.startswith("registered_layers.1.") and each.endswith("gate_up"))
    expected_eI = (mean_eI + 0.01 * mean_eI.mean(1, keepdim=True)).float()
    torch.testing.assert_close(measured[name], expected_eI, rtol=1e-4, atol=1e-9)
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
