"""The package `vllm` of examples/rl has what TRL 1.16 imports and calls with an engine in its own process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_weight_updates import PROMPTS, SETTINGS, Trained, fresh, trained_named  # noqa: F401

from moeserve import SettingsError

PACKAGE = Path(__file__).parents[2] / "examples" / "rl" / "as_vllm"
MODULES = ["sampling_params", "utils.network_utils", "distributed.weight_transfer.nccl_common"]
MODULES += ["distributed.weight_transfer.packed_tensor"]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(PACKAGE))
    yield importlib.import_module("vllm")
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def test_weights_of_a_trainer_are_taken_at_the_reset(
    vllm: Any,
    trained_named: Callable[[str], Trained],  # noqa: F811
) -> None:
    trained = trained_named("qwen3-moe")
    expected, expected_tokens = fresh(trained, trained.new)
    llm = vllm.LLM(
        model=str(trained.old),
        tensor_parallel_size=1,
        gpu_memory_utilization=0.3,
        max_model_len=SETTINGS["max_model_len"],
        max_num_seqs=None,
        enable_sleep_mode=True,
        model_impl="vllm",
        distributed_executor_backend="external_launcher",
        seed=0,
        max_num_batched_tokens=4096,
        logprobs_mode="processed_logprobs",
        quantization=None,
        trust_remote_code=False,
        kv_cache_memory="8MiB",
    )
    seen: list[dict[str, str]] = []
    llm.on_new_weights = lambda: seen.append(llm.weight_checksums())
    params = vllm.SamplingParams(n=1, temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, min_p=0.0, top_k=0)
    try:
        assert llm.llm_engine.model_config.max_model_len == SETTINGS["max_model_len"]
        llm.sleep(level=2)
        for _ in range(2):
            llm.wake_up(tags=["weights"])
            for name, tensor in trained.tensors.items():
                llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights([(name, tensor)])
            llm.reset_prefix_cache()
            llm.wake_up(tags=["kv_cache"])
            prompts = [{"prompt_token_ids": each} for each in PROMPTS]
            outputs = llm.generate(prompts, sampling_params=params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected_tokens
            llm.sleep(level=2)
        assert seen == [expected, expected]
    finally:
        llm.shutdown()


def test_names_that_trl_imports(vllm: Any) -> None:
    modules = {name: importlib.import_module(f"vllm.{name}") for name in MODULES}
    assert vllm.RequestOutput
    assert modules["sampling_params"].StructuredOutputsParams(regex="a+").regex == "a+"
    assert modules["utils.network_utils"].get_ip()
    with pytest.raises(SettingsError, match="colocate"):
        modules["distributed.weight_transfer.nccl_common"].trainer_init({})
    assert modules["distributed.weight_transfer.packed_tensor"].packed_nccl_broadcast_producer
    with pytest.raises(SettingsError, match="tensor_parallel_size=2"):
        vllm.LLM("folder", tensor_parallel_size=2, distributed_executor_backend="external_launcher")
