"""Mistakes of users raise a named error that says what to do, and the engine continues."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import Reference
from safetensors.torch import load_file, save_file

from moeserve import (
    LLM,
    CacheTooSmallError,
    CheckpointError,
    EngineError,
    MoeserveError,
    RequestError,
    SamplingParams,
    SettingsError,
)

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def broken(plain: Reference, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, for the test to damage."""
    return Path(shutil.copytree(plain.folder, tmp_path / "checkpoint"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def refusal(folder: Path | str, **settings: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        LLM(folder, **settings)
    return str(error.value)


def test_missing_folder() -> None:
    assert "no/such/folder is not a folder" in refusal("no/such/folder")


def test_folder_without_config(tmp_path: Path) -> None:
    assert "holds no config.json" in refusal(tmp_path)


def test_config_that_is_not_json(broken: Path) -> None:
    (broken / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refusal(broken)


def test_unsupported_architecture_lists_the_supported(broken: Path) -> None:
    edit_config(broken, architectures=["GPT2LMHeadModel"])
    message = refusal(broken)
    assert "'GPT2LMHeadModel' is not supported" in message
    assert "MixtralForCausalLM" in message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": []}, "architectures=[]"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "wide"}, "hidden_size='wide'"),
        ({"hidden_size": -32}, "hidden_size=-32"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than num_local_experts=4"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "must be a multiple of num_attention_heads=5"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"hidden_act": []}, "hidden_act=[]"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "lacks 'factor'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "lacks 'factor'"),
        ({"rope_parameters": None}, "rope_theta is missing"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config="),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'"),
    ],
)
def test_wrong_config_values_are_named(broken: Path, changes: dict[str, Any], says: str) -> None:
    edit_config(broken, **changes)
    message = refusal(broken)
    assert says in message
    assert "config.json" in message


def test_missing_tensor_is_named(broken: Path) -> None:
    edit_tensors(broken, lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.2.w3.weight"))
    message = refusal(broken)
    assert "lacks 1 tensors" in message
    assert "model.layers.1.block_sparse_moe.experts.2.w3.weight" in message


def test_extra_tensor_is_named(broken: Path) -> None:
    edit_tensors(broken, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}))
    message = refusal(broken)
    assert "holds 1 tensors that its config.json does not account for" in message
    assert "model.layers.0.self_attn.q_proj.bias" in message


def test_misshapen_tensor_is_named_with_both_shapes(broken: Path) -> None:
    edit_tensors(broken, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    message = refusal(broken)
    assert "'model.norm.weight'" in message
    assert "[31]" in message
    assert "[32]" in message


def test_tensor_of_a_wrong_dtype_is_named(broken: Path) -> None:
    edit_tensors(broken, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int64)}))
    assert "'model.norm.weight' is I64" in refusal(broken)


def test_truncated_shard_is_named(broken: Path) -> None:
    shard = broken / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    message = refusal(broken)
    assert "model.safetensors is damaged or incomplete" in message
    assert str(shard.stat().st_size) in message


def test_no_weights_at_all(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(broken)


@pytest.mark.parametrize("file_name", ["../model.safetensors", "/etc/passwd", "model.bin", "sub/x.safetensors"])
def test_index_that_leads_out_of_the_folder(broken: Path, file_name: str) -> None:
    index = {"weight_map": {"model.norm.weight": file_name}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{file_name!r} is not the name of a safetensors file in this folder" in refusal(broken)


def test_index_that_names_a_missing_shard(broken: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors is missing" in refusal(broken)


def test_index_that_names_a_tensor_in_the_wrong_shard(broken: Path) -> None:
    index = {"weight_map": {"model.nrom.weight": "model.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "places tensor 'model.nrom.weight' in model.safetensors" in refusal(broken)


def test_wrong_generation_config(broken: Path) -> None:
    (broken / "generation_config.json").write_text(json.dumps({"temperature": -1.0}))
    assert "generation_config.json: temperature=-1.0" in refusal(broken)
    (broken / "generation_config.json").write_text(json.dumps({"eos_token_id": "end"}))
    assert "eos_token_id='end'" in refusal(broken)


def test_an_unknown_setting_is_refused_with_the_nearest(plain: Reference) -> None:
    with pytest.raises(SettingsError, match=r"'max_model_length'.*'max_model_len'"):
        LLM(plain.folder, max_model_length=100)


def test_an_unknown_value_of_rebalance_is_refused_with_the_choices(plain: Reference) -> None:
    with pytest.raises(SettingsError, match=r"rebalance='atuo'.*'off', 'auto'"):
        LLM(plain.folder, rebalance="atuo")


def test_cache_too_small_for_one_request_says_how_many_bytes_it_takes(plain: Reference) -> None:
    # 2 layers, keys and values, 2 heads of 8 float32 values: 256 bytes a token, 4096 a block of 16
    with pytest.raises(CacheTooSmallError, match=r"max_model_len=100 tokens needs 28672 bytes \(256 per token\)"):
        LLM(plain.folder, dtype="float32", max_model_len=100, kv_cache_memory=28671)
    with LLM(plain.folder, dtype="float32", max_model_len=100, kv_cache_memory=28672) as llm:
        assert llm.config.max_model_len == 100


def test_cache_smaller_than_the_model_lowers_an_open_max_model_len(plain: Reference) -> None:
    with LLM(plain.folder, dtype="float32", kv_cache_memory=4096 * 5) as llm:
        assert llm.config.max_model_len == 80
        prompt = plain.prompts(76)[0]
        output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (4, "length")


@pytest.fixture(scope="module")
def llm(plain: Reference) -> Iterator[LLM]:
    with LLM(plain.folder, dtype="float32", max_model_len=64) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([[]], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        (["text"], "no tokenizer"),
        (list(range(3, 67)), "64 tokens"),
        ([5, 101], "101"),
        ([5, -1], "-1"),
        ([5, 2.5], "2.5"),
        ({"prompt_tokens": [5]}, "prompt_token_ids"),
        (7, "7"),
    ],
)
def test_bad_prompts_leave_the_engine_unchanged(llm: LLM, plain: Reference, prompt: Any, says: str) -> None:
    with pytest.raises(RequestError) as error:
        llm.generate(prompt, GREEDY)
    assert says in str(error.value)
    assert_alive(llm, plain)


def test_no_prompts_are_nothing_to_do(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_one_bad_prompt_keeps_the_whole_call_from_starting(llm: LLM, plain: Reference) -> None:
    with pytest.raises(RequestError, match="prompt 1"):
        llm.generate([[5, 6], [5, 1000], [7]], GREEDY)
    assert_alive(llm, plain)


def test_parameters_that_do_not_fit_the_vocabulary(llm: LLM, plain: Reference) -> None:
    with pytest.raises(RequestError, match="stop_token_ids names token 101"):
        llm.generate([[5]], SamplingParams(stop_token_ids=[101]))
    with pytest.raises(RequestError, match="logit_bias names token 500"):
        llm.generate([[5]], SamplingParams(logit_bias={500: 1.0}))
    with pytest.raises(RequestError, match="min_tokens=1 excludes the 101 tokens"):
        llm.generate([[5]], SamplingParams(stop_token_ids=list(range(101)), min_tokens=1))
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate([[5]], SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])
    assert_alive(llm, plain)


def test_a_failed_step_ends_its_requests_and_the_engine_continues(
    llm: LLM, plain: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream([5, 6], GREEDY)
    next(stream)
    executor = llm.core.executor
    with monkeypatch.context() as patch:
        patch.setattr(executor, "execute", lambda plan, agreement: torch.zeros(2) @ torch.zeros(3))
        with pytest.raises(EngineError, match=r"3 .*RuntimeError") as error:
            llm.generate([[7], [8]], GREEDY)
        assert isinstance(error.value.__cause__, RuntimeError)
    with pytest.raises(EngineError, match="RuntimeError"):  # its request ended in the same step
        next(stream)
    assert_alive(llm, plain)


def test_ctrl_c_ends_the_call_and_the_engine_continues(
    llm: LLM, plain: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(plan: object, agreement: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.core.executor, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[7], [8]], GREEDY)
    assert_alive(llm, plain)


def test_errors_have_common_bases() -> None:
    for error in (SettingsError, CheckpointError, RequestError, CacheTooSmallError):
        assert issubclass(error, MoeserveError)
        assert issubclass(error, ValueError)
    assert issubclass(EngineError, MoeserveError)


def assert_alive(llm: LLM, plain: Reference) -> None:
    assert llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids == plain.greedy([5, 6, 7], 5)
    assert not llm.core.has_work
    assert llm.core.scheduler.num_free_blocks == llm.core.executor.num_blocks
    llm.core.scheduler.check_invariants()


def test_after_shutdown_streams_end_and_calls_say_so(plain: Reference) -> None:
    with LLM(plain.folder, dtype="float32") as llm:
        stream = llm.stream([5, 6], GREEDY)
        next(stream)
    assert [output.outputs[0].finish_reason for output in stream] == ["abort"]
    with pytest.raises(EngineError, match="was shut down"):
        llm.generate([[5]], GREEDY)
    with pytest.raises(EngineError, match="was shut down"):
        next(llm.stream([5], GREEDY))
    llm.shutdown()


def test_abort_by_name_ends_a_stream(llm: LLM, plain: Reference) -> None:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, n=2)
    stream = llm.stream([5, 6], params)
    first = next(stream)
    llm.abort(first.request_id)
    llm.abort("no such request")
    last = list(stream)[-1]
    assert [output.finish_reason for output in last.outputs] == ["abort", "abort"]
    assert last.outputs[0].token_ids[: len(first.outputs[0].token_ids)] == first.outputs[0].token_ids
    assert_alive(llm, plain)


def test_as_many_parameters_as_prompts_are_needed(llm: LLM, plain: Reference) -> None:
    with pytest.raises(RequestError, match="1 prompts came with 0 sampling_params"):
        llm.generate([5, 6], [])
    assert_alive(llm, plain)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 2_000_000_000},
        {"vocab_size": 2_000_000_000},
        {"num_local_experts": 2_000_000_000},
        {"hidden_size": 2_000_000_000},
        {"rms_norm_eps": 10**400},
    ],
)
def test_absurd_sizes_are_refused_before_memory_is_taken(broken: Path, changes: dict[str, Any]) -> None:
    edit_config(broken, **changes)
    assert next(iter(changes)) in refusal(broken)


def test_weights_larger_than_any_memory(broken: Path) -> None:
    edit_config(broken, num_local_experts=2**14, intermediate_size=2**20, hidden_size=2**18, head_dim=8)
    assert "do not fit in memory" in refusal(broken)
