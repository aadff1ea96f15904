"""`moeserve verify`: it agrees with transformers, and finds planted faults of a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_families import write_family
from reference_models import Reference
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeserve import CheckpointError, SettingsError
from moeserve.api.verification import verify
from moeserve.cli import main
from moeserve.cli.verify import DIFFERS

SETTINGS: dict[str, Any] = dict(num_threads=1, max_model_len=128)
EXPERT = "model.layers.1.block_sparse_moe.experts.2."


def swap_rows(tensors: dict[str, Tensor]) -> None:
    """Swap two rows of one expert's gates, as a wrong permutation does."""
    tensors[EXPERT + "w1.weight"][[3, 4]] = tensors[EXPERT + "w1.weight"][[4, 3]]


def swap_gate_and_up(tensors: dict[str, Tensor]) -> None:
    tensors[EXPERT + "w1.weight"], tensors[EXPERT + "w3.weight"] = (tensors[EXPERT + f"w{n}.weight"] for n in (3, 1))


def round_a_norm(tensors: dict[str, Tensor]) -> None:
    """Change a norm by a hundredth, less than rounding in 16 bits hides."""
    tensors["model.norm.weight"] *= 1.01


FAULTS = {function.__name__: function for function in (swap_rows, swap_gate_and_up, round_a_norm)}


def with_fault(model: Path, copy: Path, fault: Callable[[dict[str, Tensor]], None]) -> Path:
    shutil.copytree(model, copy)
    tensors = load_file(copy / "model.safetensors")
    fault(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_random_model_agrees(reference_named: Callable[[str], Reference], dtype: str) -> None:
    """It has no tokenizer, so its prompts are random tokens."""
    found = verify({"model": str(reference_named("mixtral").folder), "dtype": dtype, **SETTINGS}, num_tokens=8)
    assert found.agrees
    assert len(found.tokens) == 10 * 8
    assert (found.largest_difference < 1e-4) == (dtype == "float32")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(reference_named: Callable[[str], Reference], tmp_path: Path, fault: str) -> None:
    model = reference_named("mixtral").folder
    copy = with_fault(model, tmp_path / "copy", FAULTS[fault])
    found = verify({"model": str(copy), **SETTINGS}, reference=str(model), num_tokens=8)
    assert not found.agrees
    assert verify({"model": str(copy), **SETTINGS}, num_tokens=8).agrees  # the fault is not in the engine


def test_the_exit_status_and_both_texts(
    reference_named: Callable[[str], Reference], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = reference_named("mixtral").folder
    copy = with_fault(model, tmp_path / "copy", swap_gate_and_up)
    flags = ["--num-threads", "1", "--max-model-len", "128", "--tokens", "4"]
    assert main(["verify", str(model), *flags]) == 0
    assert "agree in float32: 40 of 40 tokens" in capsys.readouterr().out
    assert main(["verify", str(copy), "--reference", str(model), "--json", *flags]) == DIFFERS
    found = json.loads(capsys.readouterr().out)
    assert (found["agrees"], found["reference"], len(found["prompts"])) == (False, str(model), 10)
    assert main(["verify", str(tmp_path / "missing"), *flags]) == 1


def test_a_gguf_file_is_compared_with_the_checkpoint_that_it_was_made_from(
    reference_named: Callable[[str], Reference], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    model = reference_named("mixtral").folder
    settings = {"model": str(write_family(model, tmp_path / "model.gguf")), **SETTINGS}
    assert verify(settings, reference=str(model), num_tokens=4).agrees
    with pytest.raises(CheckpointError, match="reference"):
        verify(settings, num_tokens=4)


@pytest.mark.parametrize("setting", [{"quantization": "int8"}, {"hf_overrides": {"rope_theta": 5.0}}])
def test_settings_that_change_the_model_are_refused(
    reference_named: Callable[[str], Reference], setting: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError, match=next(iter(setting))):
        verify({"model": str(reference_named("mixtral").folder), **setting})


def test_a_model_that_transformers_cannot_read_is_named(
    reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    model = reference_named("mixtral").folder
    broken = with_fault(model, tmp_path / "broken", lambda tensors: None)
    (broken / "config.json").write_text('{"model_type": "unknown"}')
    with pytest.raises(CheckpointError, match=r"broken .*reference"):
        verify({"model": str(model), **SETTINGS}, reference=str(broken), num_tokens=2)


@pytest.mark.ranks
@pytest.mark.slow
def test_the_default_model_agrees_in_several_ranks(default_cache: Path) -> None:
    found = verify({"data_parallel_size": 2, "max_model_len": 2048, "kv_cache_memory": "256MiB"}, num_tokens=4)
    assert found.agrees
    assert found.prompts[0].text.startswith(" Paris")
    assert torch.tensor([token.difference for token in found.tokens]).max() < 1e-3
