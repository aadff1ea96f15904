"""Mistakes of users raise a named error that says what to do, and the engine continues."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
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
    RequestError,
    SamplingParams,
    SettingsError,
)
from moeserve.step_inputs import StepInputs
from moeserve.worker.step_runner import StepOutputs

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def broken(plain: Reference, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, for the test to damage."""
    return Path(shutil.copytree(plain.folder, tmp_path / "checkpoint"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def refusal(folder: Path | str, **settings: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        LLM(folder, **settings)
    return str(error.value)


def test_folders_that_are_no_checkpoint(broken: Path, tmp_path: Path) -> None:
    assert "no/such/folder" in refusal("no/such/folder")
    (tmp_path / "empty").mkdir()
    assert "config.json" in refusal(tmp_path / "empty")
    (broken / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refusal(broken)


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], []])
def test_an_unsupported_architecture_is_named(broken: Path, architectures: list[str]) -> None:
    edit_config(broken, architectures=architectures, model_type="gpt2")
    assert all(name in refusal(broken) for name in architectures or ["architectures=[]"])


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("model.layers.1.block_sparse_moe.experts.2.w3.weight", None, ["lacks 1 tensors"]),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(32), ["holds 1 tensors"]),
        ("model.norm.weight", torch.ones(31), ["[31]", "[32]"]),
        ("model.norm.weight", torch.ones(32, dtype=torch.int64), ["I64"]),
    ],
)
def test_a_missing_unknown_or_wrong_tensor_is_named(
    broken: Path, name: str, tensor: torch.Tensor | None, says: list[str]
) -> None:
    path = broken / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(path).items()} | {name: tensor}
    save_file({key: value for key, value in tensors.items() if value is not None}, path)
    message = refusal(broken)
    assert all(text in message for text in [name, *says])


def test_truncated_shard_is_named(broken: Path) -> None:
    shard = broken / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    message = refusal(broken)
    assert "model.safetensors is damaged or incomplete" in message
    assert str(shard.stat().st_size) in message


def test_no_weights_at_all(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(broken)


@pytest.mark.parametrize(
    ("name", "file_name", "says"),
    [
        *(("model.norm.weight", leading_out, "is not the name of") for leading_out in ("../model.safetensors", "/x")),
        ("model.norm.weight", "model.bin", "is not the name of"),
        ("model.nrom.weight", "model.safetensors", "'model.nrom.weight'"),
    ],
)
def test_a_wrong_index_is_refused(broken: Path, name: str, file_name: str, says: str) -> None:
    (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: file_name}}))
    message = refusal(broken)
    assert file_name in message
    assert says in message


def test_wrong_generation_config(broken: Path) -> None:
    (broken / "generation_config.json").write_text(json.dumps({"temperature": -1.0}))
    assert "generation_config.json: temperature=-1.0" in refusal(broken)
    (broken / "generation_config.json").write_text(json.dumps({"eos_token_id": "end"}))
    assert "eos_token_id='end'" in refusal(broken)


def test_an_unknown_value_of_rebalance_is_refused_with_the_choices(plain: Reference) -> None:
    with pytest.raises(SettingsError, match=r"rebalance='atuo'.*'off', 'auto'"):
        LLM(plain.folder, rebalance="atuo")


def test_cache_too_small_for_one_request_says_how_many_bytes_it_takes(plain: Reference) -> None:
    # 2 layers, keys and values, 2 heads of 8 float32 values: 256 bytes a token, 4096 a block of 16
    with pytest.raises(CacheTooSmallError, match=r"max_model_len=100 tokens needs 28672 bytes \(256 per token\)"):
        LLM(plain.folder, dtype="float32", max_model_len=100, kv_cache_memory=28671)
    with LLM(plain.folder, dtype="float32", max_model_len=100, kv_cache_memory=28672) as llm:
        assert llm.config.schedule.max_model_len == 100


def test_cache_smaller_than_the_model_lowers_an_open_max_model_len(plain: Reference) -> None:
    with LLM(plain.folder, dtype="float32", kv_cache_memory=4096 * 5) as llm:
        assert llm.config.schedule.max_model_len == 80
        prompt = plain.prompts(76)[0]
        output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (4, "length")


@pytest.fixture(scope="module")
def llm(plain: Reference) -> Iterator[LLM]:
    with LLM(plain.folder, dtype="float32", max_model_len=64) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([[]], {}, "empty"),
        (["text"], {}, "no tokenizer"),
        ([[5, 6], [5, 101], [7]], {}, "prompt 1"),
        ([5], {"stop_token_ids": [101]}, "stop_token_ids names token 101"),
        ([5], {"stop_token_ids": list(range(101)), "min_tokens": 1}, "min_tokens=1 excludes the 101 tokens"),
    ],
)
def test_bad_prompts_and_parameters_leave_the_engine_unchanged(
    llm: LLM, plain: Reference, prompt: Any, params: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate(prompt, SamplingParams(**params))
    assert_alive(llm, plain)
    assert llm.generate([]) == []


def test_a_failed_step_ends_its_requests_and_the_engine_continues(
    llm: LLM, plain: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream([5, 6], GREEDY)
    next(stream)
    runner = llm.core.replicas[0].executor.worker.runner  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "start", lambda *_, **__: torch.zeros(2) @ torch.zeros(3))
        with pytest.raises(EngineError, match="RuntimeError"):
            llm.generate([[7], [8]], GREEDY)
    with pytest.raises(EngineError, match="RuntimeError"):  # its request ended in the same step or the one before
        list(stream)
    assert_alive(llm, plain)


def test_a_row_that_cannot_be_sampled_ends_its_own_request(
    llm: LLM, plain: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of the step continue. All callers of the request get the error."""
    model = llm.core.replicas[0].executor.worker.runner.model  # type: ignore[attr-defined]
    logits = model.logits

    def with_nan(hidden_TD: torch.Tensor) -> torch.Tensor:
        logits_TV = logits(hidden_TD).clone()
        if len(logits_TV) > 1:  # beside the good request, which is older
            logits_TV[-1, 3] = torch.nan
        return logits_TV

    good = llm.stream([5, 6], SamplingParams(temperature=0, max_tokens=30))
    next(good)
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", with_nan)
        with pytest.raises(EngineError, match="NaN"):
            llm.generate([[7]], GREEDY)
    assert list(good)[-1].outputs[0].token_ids == plain.greedy([5, 6], 30)
    assert_alive(llm, plain)


def test_a_damaged_part_of_a_prompt_ends_its_request_and_is_not_cached(
    plain: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = plain.prompts(50)
    with LLM(plain.folder, dtype="float32", max_model_len=64, max_num_batched_tokens=32) as llm:
        runner = llm.core.replicas[0].executor.worker.runner  # type: ignore[attr-defined]

        class Damaging:
            padded_size = staticmethod(runner.step_runner.padded_size)
            run = staticmethod(runner.step_runner)

            def __call__(self, step: StepInputs) -> StepOutputs:
                outputs: StepOutputs = self.run(step)
                if len(step.logits_rows):
                    return outputs
                return StepOutputs(torch.full_like(outputs.hidden_TD, torch.nan))

        with monkeypatch.context() as patch:
            patch.setattr(runner, "step_runner", Damaging())
            with pytest.raises(EngineError, match="NaN or infinite hidden states"):
                llm.generate([prompt], GREEDY)
        output = llm.generate([prompt], GREEDY)[0]
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == plain.greedy(prompt, 5)


def test_ctrl_c_ends_the_call_and_the_engine_continues(
    llm: LLM, plain: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = llm.core.replicas[0].executor  # type: ignore[attr-defined]
    submit = executor.submit

    def interrupted(work: Any) -> Any:
        signal.raise_signal(signal.SIGINT)  # it is raised when the call waits
        return submit(work)

    with monkeypatch.context() as patch:
        patch.setattr(executor, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[7], [8]], GREEDY)
    assert_alive(llm, plain)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_ctrl_c_while_prompts_are_submitted_leaves_none(
    llm: LLM, plain: Reference, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return submit(*arguments)

    submit = llm.session._submit
    with monkeypatch.context() as patch:
        patch.setattr(llm.session, "_submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(llm.stream([7], GREEDY)) if call == "stream" else llm.generate([[7]], GREEDY)
    assert llm.session.frontend.num_requests == 0
    assert_alive(llm, plain)


def assert_alive(llm: LLM, plain: Reference) -> None:
    assert llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids == plain.greedy([5, 6, 7], 5)
    assert not llm.core.has_work


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


@pytest.mark.parametrize("changes", [{"num_local_experts": 2_000_000_000}, {"rms_norm_eps": 10**400}])
def test_absurd_sizes_are_refused_before_memory_is_taken(broken: Path, changes: dict[str, Any]) -> None:
    edit_config(broken, **changes)
    assert next(iter(changes)) in refusal(broken)


def test_weights_larger_than_any_memory(broken: Path) -> None:
    edit_config(broken, num_local_experts=2**14, intermediate_size=2**20, hidden_size=2**18, head_dim=8)
    assert "do not fit in memory" in refusal(broken)
