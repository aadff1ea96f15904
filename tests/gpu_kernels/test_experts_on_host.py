"""A model on GPU kernels, in Triton's interpreter, with experts on the CPU's: tokens equal those of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the engine what a GPU with `expert_device="cpu"` has: Triton's kernels, and the CPU's for experts."""
    resolve = startup.resolve

    def with_experts_on_host(*arguments: Any, **named: Any) -> EngineConfig:
        config = resolve(*arguments, **named)
        return dataclasses.replace(config, weights=dataclasses.replace(config.weights, experts_on_host=True))

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
