"""Every family against transformers in float32, for any batch, chunking, caching, preemption and layout on disk."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from chunks import make_chunk
from reference_models import SHAPES, Reference, in_the_style_of_the_hub, make_reference
from safetensors.torch import load_file, save_file

from moeserve import LLM, SamplingParams
from moeserve.config.engine_config import EngineConfig
from moeserve.engine import base
from moeserve.engine.base import new_scheduler
from moeserve.kv.state_pool import STATE_INTERVAL
from moeserve.models.registry import describe
from moeserve.scheduling.scheduler import Scheduler
from moeserve.worker.protocol import Loaded

NUM_TOKENS = 24
LENGTHS = (1, 5, 17, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
CACHE = "8MiB"

# One shape of each kind of mixer: windows, latent attention, that to chosen positions, sinks, recurrent states, short
# convolutions, compressed entries, narrow values, selective scans, lightning attention, experts of attention, chosen
# blocks, convolved queries and keys.
ATTENTION_KINDS = ["mixtral-window", "deepseek-v3", "glm5", "gpt-oss", "qwen3-next", "lfm2-moe", "deepseek-v4"]
ATTENTION_KINDS += ["mimo-v2-flash", "nemotron-h", "jamba", "minimax", "jetmoe", "minimax-m3", "zaya"]
ATTENTION_KINDS += ["hy-v4", "dots3-note"]


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


def tokens_in(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    with LLM(folder, dtype="float32", kv_cache_memory=CACHE) as llm:
        return tokens_of(llm, prompts)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[list[int]]:
    return continuations(reference)


@functools.cache
def continuations(reference: Reference) -> list[list[int]]:
    """Return the continuations of transformers."""
    prompts = reference.prompts(*LENGTHS)
    found = reference.continuations(prompts, NUM_TOKENS)
    assert all(reference.is_clear(prompt, NUM_TOKENS) for prompt in prompts)
    return found


@pytest.fixture
def llm(reference: Reference) -> LLM:
    """An engine shared by tests that change nothing."""
    return reference.llm


def test_one_batch(llm: LLM, reference: Reference, expected: list[list[int]]) -> None:
    assert tokens_of(llm, reference.prompts(*LENGTHS)) == expected


@pytest.mark.slow_but(*(f"[{name}]" for name in ATTENTION_KINDS))
def test_chunked_prefill_and_prefix_cache_hits(reference: Reference, expected: list[list[int]]) -> None:
    prompts = reference.prompts(*LENGTHS)
    with LLM(reference.folder, dtype="float32", max_num_batched_tokens=7, block_size=4, kv_cache_memory=CACHE) as llm:
        assert tokens_of(llm, prompts) == expected
        outputs = llm.generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        # Every full block but the one that holds the last token, which must be computed; with recurrent states, as
        # many as a saved state has seen.
        unit = STATE_INTERVAL if describe(reference.folder).model.needs.keeps_state else 4
        assert [output.num_cached_tokens for output in outputs] == [(length - 1) // unit * unit for length in LENGTHS]


@pytest.mark.parametrize("reference", ATTENTION_KINDS, indirect=True)
def test_preemption(llm: LLM, reference: Reference, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    max_len = max(LENGTHS) + NUM_TOKENS
    block_size = 8  # that of `llm`, on which the bytes per token of compressed entries depend
    bytes_per_token = llm.core.replicas[0].executor.worker.runner.model.cache_needs.bytes_per_token  # type: ignore[attr-defined]
    # room for the longest request and a little more: four at once cannot all stay
    memory = bytes_per_token * block_size * (-(-max_len // block_size) + 3)
    made: list[Scheduler] = []

    def recorded(config: EngineConfig, loaded: Sequence[Loaded]) -> Scheduler:
        made.append(new_scheduler(config, loaded))
        return made[-1]

    monkeypatch.setattr(base, "new_scheduler", recorded)
    with LLM(
        reference.folder,
        dtype="float32",
        max_model_len=max_len,
        block_size=block_size,
        kv_cache_memory=memory,
        enable_prefix_caching=False,
    ) as small:
        assert tokens_of(small, reference.prompts(*LENGTHS)) == expected
    assert made[0].num_preemptions > 0


def test_prompt_logits(llm: LLM, reference: Reference) -> None:
    """Logits of every position of a prompt are within 1e-4, for any chunk sizes."""
    prompt = reference.prompts(90, seed=3)[0]
    assert reference.num_undecided(prompt) == 0
    wanted = reference.logits(prompt)
    chunks = (90,), (13, 1, 1, 1)
    differences = {sizes: float((logits_of(llm, prompt, *sizes) - wanted).abs().max()) for sizes in chunks}
    assert max(differences.values()) < 1e-4, differences


def logits_of(llm: LLM, token_ids: list[int], *chunks: int) -> torch.Tensor:
    """Return the logits [T, vocab_size] of a prompt that the model runner computes in chunks of these sizes."""
    runner = llm.core.replicas[0].executor.worker.runner  # type: ignore[attr-defined]
    rows: list[torch.Tensor] = []
    start = 0
    for size in itertools.cycle(chunks):
        piece = token_ids[start : start + size]
        blocks = list(range(-(-(start + len(piece)) // runner.model.context.block_size)))
        chunk_of_prompt = make_chunk(runner.table, 0, piece, start, blocks)
        with torch.inference_mode():
            step = runner.build_inputs([chunk_of_prompt], (len(piece),))
            rows.append(runner.model.logits(runner.model(step, runner.step_runner.caches)))
        start += size
        if start >= len(token_ids):
            break
    return torch.cat(rows)


@pytest.mark.parametrize("reference", ATTENTION_KINDS, indirect=True)
def test_prompt_logprobs_equal_the_reference(reference: Reference) -> None:
    prompt = reference.prompts(70, seed=4)[0]
    assert reference.num_undecided(prompt) == 0
    wanted = reference.logits(prompt).log_softmax(-1)
    with LLM(reference.folder, dtype="float32", max_num_batched_tokens=19, kv_cache_memory=CACHE) as llm:
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


@pytest.mark.slow_but("mixtral", "deepseek-v3", "qwen3-next", "gpt-oss", "jamba")
def test_bf16_is_as_close_to_float32_as_transformers_bf16_is(reference: Reference) -> None:
    """Mean difference to float32 of the log-probabilities of a text's tokens: at most twice transformers' own."""
    prompts = reference.prompts(64, 64, 64, 64, seed=7)
    exact = torch.stack([reference.logits(prompt).log_softmax(-1) for prompt in prompts])
    rounded = reread(reference.folder, reference, dtype=torch.bfloat16)
    theirs = torch.stack([rounded.logits(prompt).float().log_softmax(-1) for prompt in prompts])
    targets = torch.tensor(prompts)[:, 1:, None]

    def at_targets(logprobs: torch.Tensor) -> torch.Tensor:
        return logprobs[:, :-1].gather(2, targets)[..., 0]

    with LLM(reference.folder, dtype="bfloat16", kv_cache_memory=CACHE) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        given = [output.prompt_logprobs for output in llm.generate(prompts, params)]
    ours = torch.tensor(
        [
            [row[token].logprob for row, token in zip(rows[1:], prompt[1:], strict=True)]
            for rows, prompt in zip(given, prompts, strict=True)
        ]
    )
    their_gap = float((at_targets(theirs) - at_targets(exact)).abs().mean())
    our_gap = float((ours - at_targets(exact)).abs().mean())
    assert our_gap <= 2 * their_gap


def reread(folder: Path, reference: Reference, *, dtype: torch.dtype) -> Reference:
    """Return the reference that transformers reads from a folder."""
    model = type(reference.model).from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.config._experts_implementation = "eager"
    return Reference(folder, model.eval())


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek-v2", "deepseek-v3", "deepseek-v4", "qwen2-moe", "qwen3-moe", "glm4-moe-groups", "gpt-oss"),
        *("mimo-v2-flash", "gemma4", "phimoe"),
    ],
)
def test_config_in_the_style_of_the_hub(name: str, reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    reference = reference_named(name)
    folder = copy_of(reference, tmp_path)
    values = in_the_style_of_the_hub(json.loads((folder / "config.json").read_text()))
    assert "rope_parameters" not in values
    (folder / "config.json").write_text(json.dumps(values))
    assert_model_is_the_same(folder, reference)


def assert_model_is_the_same(folder: Path, reference: Reference) -> None:
    """A checkpoint gives the model of a reference, in transformers and here."""
    text = reference.prompts(90, seed=3)[0]
    torch.testing.assert_close(reread(folder, reference, dtype=torch.float32).logits(text), reference.logits(text))
    assert tokens_in(folder, reference.prompts(*LENGTHS)) == continuations(reference)


@pytest.mark.parametrize("length", ["short", "long"])
def test_longrope_scales_by_the_longest_request(length: str, tmp_path: Path) -> None:
    """If requests may be longer than the original context, all positions have the factors of long contexts."""
    shape = SHAPES["phimoe"]
    rope = shape.settings["rope_parameters"]
    always = {f"{each}_{kind}": rope[f"{length}_{kind}"] for kind in ("factor", "mscale") for each in ("short", "long")}
    settings = shape.settings | {"rope_parameters": rope | always}
    reference = make_reference(tmp_path, dataclasses.replace(shape, settings=settings, seed=2))
    config = json.loads((tmp_path / "config.json").read_text())
    original = {"original_max_position_embeddings": 64}
    config |= original | {"rope_parameters": config["rope_parameters"] | rope | original}
    (tmp_path / "config.json").write_text(json.dumps(config))
    max_model_len = 65 if length == "long" else 64
    with LLM(tmp_path, dtype="float32", kv_cache_memory=CACHE, max_model_len=max_model_len) as llm:
        assert tokens_of(llm, reference.prompts(*LENGTHS)) == continuations(reference)


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_experts_fused_in_one_tensor_load_alike(
    name: str, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    """All experts of a layer may be in one three-dimensional tensor."""
    reference = reference_named(name)
    published = load_file(reference.folder / "model.safetensors")
    fused = fuse_experts(published)
    assert 0 < len(fused) < len(published)
    assert not any(re.search(r"experts\.\d", tensor) for tensor in fused)
    save_file(fused, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(reference.folder / "config.json", tmp_path)
    assert_model_is_the_same(tmp_path, reference)


def fuse_experts(published: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fuse a tensor per expert to `mlp.experts.gate_up_proj` [E, 2I, D] and `mlp.experts.down_proj` [E, D, I]."""
    word = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's names
    fused: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for name, tensor in published.items():
        name = name.replace("block_sparse_moe", "mlp")
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            fused[name] = tensor
            continue
        of_layer = experts.setdefault(match[1], {})
        of_layer.setdefault(word.get(match[3], match[3]), {})[int(match[2])] = tensor
    for prefix, projections in experts.items():
        gate, up, down = (
            torch.stack([tensor for _, tensor in sorted(projections[name].items())])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        fused[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        fused[f"{prefix}.down_proj"] = down
    return fused


def test_multi_token_prediction_layers_are_skipped_in_any_shard(
    reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    """DeepSeek-V3 is published with one more layer after the last, in many shards."""
    reference = reference_named("deepseek-v3")
    reference.model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    num_layers = reference.model.config.num_hidden_layers
    tensors = {f"model.layers.{num_layers}.{name}": torch.ones(3) for name in ("enorm.weight", "mlp.gate.weight")}
    save_file(tensors, tmp_path / "model-extra.safetensors")
    index["weight_map"] |= dict.fromkeys(tensors, "model-extra.safetensors")
    index_path.write_text(json.dumps(index))
    assert tokens_in(tmp_path, reference.prompts(*LENGTHS)) == continuations(reference)


def test_a_duplicate_of_the_tied_head_and_frequencies_are_ignored(
    reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Older checkpoints hold both."""
    reference = reference_named("mixtral-odd")
    published = load_file(reference.folder / "model.safetensors")
    extra = {"lm_head.weight": published["model.embed_tokens.weight"].clone()}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = reference.model.model.rotary_emb.inv_freq.clone()
    folder = copy_of(reference, tmp_path)
    save_file(published | extra, folder / "model.safetensors", metadata={"format": "pt"})
    assert_model_is_the_same(folder, reference)


def test_abort_leaves_the_others_alone(plain: Reference) -> None:
    prompts = plain.prompts(*LENGTHS)
    with LLM(plain.folder, dtype="float32", kv_cache_memory=CACHE) as llm:
        stream = llm.stream(prompts[0], GREEDY)
        assert next(stream).outputs[0].token_ids  # one, or more if the next step has ended already
        stream.close()
        assert tokens_of(llm, prompts) == continuations(plain)
        while llm.session.has_work:  # the engine is a step ahead
            llm.session.poll()


def copy_of(reference: Reference, folder: Path) -> Path:
    return Path(shutil.copytree(reference.folder, folder / "checkpoint"))
