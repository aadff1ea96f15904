"""A model on GPU kernels, in Triton's interpreter, with experts on the CPU's: tokens equal those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import Reference
from test_engine_on_gpu_kernels import assert_greedy_tokens, model_of, started

from moeserve.api import startup
from moeserve.config.engine_config import EngineConfig
from moeserve.layers.moe.dispatch.host import HostDispatcher
from moeserve.ops.backend import TRITON
from moeserve.worker import loading


@pytest.fixture
def num_cpu_layers(request: pytest.FixtureRequest) -> int | None:
    """The setting, as a parameter of tests."""
    return getattr(request, "param", None)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, num_cpu_layers: int | None) -> None:
    """Give the engine what a GPU with `expert_device="cpu"` has: Triton's kernels, and the CPU's for experts."""
    resolve = startup.resolve

    def with_experts_on_host(*arguments: Any, **named: Any) -> EngineConfig:
        return resolve(*arguments, **named).changed(weights={"experts_on_host": True, "num_cpu_layers": num_cpu_layers})

    monkeypatch.setattr(startup, "resolve", with_experts_on_host)
    monkeypatch.setattr(loading, "_select_backend", lambda config, device: TRITON)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "deepseek-v3", "gpt-oss", "nemotron-h-latent"])
def test_tokens_equal_transformers(name: str, on_host: None, reference_named: Callable[[str], Reference]) -> None:
    """With shared experts, biases, latent experts, and groups of experts."""
    reference = reference_named(name)
    with started(reference) as llm:
        model = model_of(llm)
        for moe in model.moe_layers.values():
            assert isinstance(moe.dispatcher, HostDispatcher)
            assert type(moe.experts.gate_up.product).__module__.endswith(".cpu")
        assert type(model.head.weights.product).__module__.endswith(".triton")
        assert_greedy_tokens(llm, reference)
        window = llm.expert_load()
    assert sum(map(sum, window.tokens_of_expert)) > 0, "rows are counted on the host"


@pytest.mark.slow
@pytest.mark.parametrize("num_cpu_layers", [1], indirect=True)
@pytest.mark.parametrize(("name", "on_disk"), [("mixtral", {}), ("gpt-oss", {}), ("mixtral", {"expert_memory": "50%"})])
def test_experts_of_the_first_layer_alone(
    name: str,
    on_disk: dict[str, str],
    num_cpu_layers: int,
    on_host: None,
    reference_named: Callable[[str], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other layers compute theirs with the GPU's kernels."""
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    reference = reference_named(name)
    with started(reference, **on_disk) as llm:
        first, *others = model_of(llm).moe_layers.values()
        assert isinstance(first.dispatcher, HostDispatcher)
        assert type(first.experts.gate_up.product).__module__.endswith(".cpu")
        assert (first.experts.stored is not None) == bool(on_disk)
        assert others
        for moe in others:
            assert not isinstance(moe.dispatcher, HostDispatcher)
            assert type(moe.experts.gate_up.product).__module__.endswith(".triton")
            assert moe.experts.stored is None
        assert_greedy_tokens(llm, reference)
        window = llm.expert_load()
    assert all(sum(of_layer) > 0 for of_layer in window.tokens_of_expert)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_only_experts_are_quantised(
    quantization: str, on_host: None, reference_named: Callable[[str], Reference]
) -> None:
    with started(reference_named("mixtral"), quantization=quantization) as llm:
        model = model_of(llm)
        (moe, *_) = model.moe_layers.values()
        assert moe.experts.gate_up.panels.dtype == torch.uint8
        assert moe.experts.gate_up.context.quantization == quantization
        assert model.head.weights.context.quantization is None
        (output,) = llm.generate([[3, 1, 4]], use_tqdm=False)
        assert output.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_experts_on_disk_give_the_same_tokens(
    quantization: str | None,
    on_host: None,
    reference_named: Callable[[str], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Written by the first start, and read by the second."""
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    reference = reference_named("mixtral")
    outputs = []
    for on_disk in ({}, {"expert_memory": "50%"}, {"expert_memory": "50%"}):
        with started(reference, quantization=quantization, **on_disk) as llm:
            found = llm.generate(reference.prompts(5, 9), use_tqdm=False)
            outputs.append([output.outputs[0].token_ids for output in found])
            (moe, *_) = model_of(llm).moe_layers.values()
            assert (moe.experts.stored is not None) == bool(on_disk)
    assert outputs[0] == outputs[1] == outputs[2]
