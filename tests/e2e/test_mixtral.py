"""Greedy tokens and logits against transformers in float32, whatever the batch, chunking, caching or preemption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Reference
from safetensors.torch import load_file, save_file

from moeserve import LLM, SamplingParams

NUM_TOKENS = 64
LENGTHS = (1, 5, 17, 64, 33)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[list[int]]:
    return [reference.greedy(prompt, NUM_TOKENS) for prompt in reference.prompts(*LENGTHS)]


def test_one_batch(reference: Reference, expected: list[list[int]]) -> None:
    with LLM(reference.folder, dtype="float32") as llm:
        assert tokens_of(llm, reference.prompts(*LENGTHS)) == expected


def test_one_by_one(reference: Reference, expected: list[list[int]]) -> None:
    with LLM(reference.folder, dtype="float32", enable_prefix_caching=False) as llm:
        assert [tokens_of(llm, [prompt])[0] for prompt in reference.prompts(*LENGTHS)] == expected


def test_chunked_prefill(reference: Reference, expected: list[list[int]]) -> None:
    with LLM(reference.folder, dtype="float32", max_num_batched_tokens=7, block_size=3) as llm:
        assert tokens_of(llm, reference.prompts(*LENGTHS)) == expected


def test_prefix_cache_hits(reference: Reference, expected: list[list[int]]) -> None:
    with LLM(reference.folder, dtype="float32", block_size=4) as llm:
        prompts = reference.prompts(*LENGTHS)
        tokens_of(llm, prompts)
        outputs = llm.generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        # every full block but the one that holds the last token, which must be computed
        assert [output.num_cached_tokens for output in outputs] == [(length - 1) // 4 * 4 for length in LENGTHS]


def test_preemption(reference: Reference, expected: list[list[int]]) -> None:
    max_len = max(LENGTHS) + NUM_TOKENS
    block_size = 4
    config = reference.model.config
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    bytes_per_token = 2 * config.num_key_value_heads * head_dim * 4 * config.num_hidden_layers
    # room for the longest request and a little more: five at once cannot all stay
    memory = bytes_per_token * block_size * (-(-max_len // block_size) + 6)
    with LLM(
        reference.folder,
        dtype="float32",
        max_model_len=max_len,
        block_size=block_size,
        kv_cache_memory=memory,
        enable_prefix_caching=False,
    ) as llm:
        assert tokens_of(llm, reference.prompts(*LENGTHS)) == expected
        assert llm.core.scheduler.num_preemptions > 0


def test_prompt_logits(reference: Reference) -> None:
    """Logits of every position of a prompt, chunk by chunk, within 1e-4."""
    prompt = reference.prompts(90, seed=3)[0]
    wanted = reference.logits(prompt)
    with LLM(reference.folder, dtype="float32", block_size=8) as llm:
        assert (logits_of(llm, prompt, chunk=90) - wanted).abs().max() < 1e-4
        assert (logits_of(llm, prompt, chunk=13) - wanted).abs().max() < 1e-4
        assert (logits_of(llm, prompt, chunk=1) - wanted).abs().max() < 1e-4


def logits_of(llm: LLM, token_ids: list[int], chunk: int) -> torch.Tensor:
    """Logits [T, vocab_size] that the model runner computes, `chunk` tokens a step."""
    from moeserve.messages import Chunk, StepPlan

    runner = llm.core.executor.worker.runner  # type: ignore[attr-defined]
    rows = []
    for start in range(0, len(token_ids), chunk):
        piece = token_ids[start : start + chunk]
        blocks = list(range(-(-(start + len(piece)) // runner.block_size)))
        plan = StepPlan(step=0, chunks=[Chunk(token_ids=piece, start=start, block_ids=blocks)])
        with torch.inference_mode():
            rows.append(runner.model.logits(runner.model(runner.build_inputs(plan), runner.caches)))
    return torch.cat(rows)


def test_prompt_logprobs_equal_the_reference(reference: Reference) -> None:
    prompt = reference.prompts(70, seed=4)[0]
    wanted = reference.logits(prompt).log_softmax(-1)
    with LLM(reference.folder, dtype="float32", max_num_batched_tokens=19) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2, logprobs=2)
        output = llm.generate([prompt], params)[0]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for position, given in enumerate(output.prompt_logprobs[1:]):
        assert given is not None
        assert given[prompt[position + 1]].logprob == pytest.approx(
            float(wanted[position, prompt[position + 1]]), abs=1e-4
        )
        best = int(wanted[position].argmax())
        assert given[best].rank == 1
    first = output.outputs[0].logprobs[0]  # type: ignore[index]
    assert first[output.outputs[0].token_ids[0]].logprob == pytest.approx(float(wanted[-1].max()), abs=1e-4)


def test_experts_fused_in_one_tensor_load_alike(plain: Reference, tmp_path: Path) -> None:
    """The layout with all experts of a layer in one three-dimensional tensor."""
    published = load_file(plain.folder / "model.safetensors")
    config = plain.model.config
    for layer in range(config.num_hidden_layers):
        old = f"model.layers.{layer}.block_sparse_moe"
        experts = [
            {w: published.pop(f"{old}.experts.{e}.{w}.weight") for w in ("w1", "w2", "w3")}
            for e in range(config.num_local_experts)
        ]
        new = f"model.layers.{layer}.mlp"
        published[f"{new}.experts.gate_up_proj"] = torch.stack([torch.cat([e["w1"], e["w3"]]) for e in experts])
        published[f"{new}.experts.down_proj"] = torch.stack([e["w2"] for e in experts])
        published[f"{new}.gate.weight"] = published.pop(f"{old}.gate.weight")
    save_file(published, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((plain.folder / "config.json").read_text())
    prompts = plain.prompts(9, 20)
    with LLM(tmp_path, dtype="float32") as llm:
        assert tokens_of(llm, prompts) == [plain.greedy(prompt, NUM_TOKENS) for prompt in prompts]


def test_abort_leaves_the_others_alone(plain: Reference) -> None:
    prompts = plain.prompts(8, 9, 10)
    with LLM(plain.folder, dtype="float32") as llm:
        stream = llm.stream(prompts[0], GREEDY)
        assert len(next(stream).outputs[0].token_ids) == 1
        stream.close()
        assert not llm.core.has_work
        assert tokens_of(llm, prompts) == [plain.greedy(prompt, NUM_TOKENS) for prompt in prompts]
        llm.core.scheduler.check_invariants()
