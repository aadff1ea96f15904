"""Layers for multi-token prediction: their drafts equal an independent model's, and no byte of a result changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import Reference
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moeserve import LLM, SamplingParams, SettingsError
from moeserve.config.resolve import MachineFacts, resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.engine.base import new_scheduler
from moeserve.models.registry import read_facts
from moeserve.protocol import Request
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import Intent, Round, make_row
from moeserve.worker.worker import Worker

MTP = {"method": "mtp", "num_speculative_tokens": 1}
NAMES = ("deepseek-v3", "glm4-moe", "glm4-moe-lite", "qwen3-next")


@dataclass(frozen=True)
class Names:
    """Where a family's checkpoints have the parts of the layer."""

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str


def names_of(reference: Reference) -> Names:
    if reference.model.config.model_type == "qwen3_next":
        return Names("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    layer = f"model.layers.{reference.model.config.num_hidden_layers}"
    return Names(layer, f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.eh_proj", f"{layer}.shared_head.norm")


class DraftModel(nn.Module):
    """The layer as it was published, on top of transformers' model: norms and a projection of its own, a decoder layer
    of the family, and the model's embedding and head.
    """

    def __init__(self, reference: Reference) -> None:
        super().__init__()
        model = reference.model
        size = model.config.hidden_size
        self.number, like = next(  # the last layer with attention and experts
            (number, layer)
            for number, layer in reversed(list(enumerate(model.model.layers)))
            if hasattr(layer, "self_attn") and hasattr(layer.mlp, "experts")
        )
        torch.manual_seed(3)
        self.layer = type(like)(model.config, self.number)
        self.embedding_norm, self.hidden_norm, self.norm = (type(like.input_layernorm)(size) for _ in range(3))
        self.projection = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.normal_(float("norm" in name and bool(parameter.any())), 0.2)
            for name, buffer in self.named_buffers():
                if "correction" in name:
                    buffer.normal_(0.0, 0.3)
        self.model = model
        self.eval()

    @torch.no_grad()
    def drafts(self, token_ids: Sequence[int]) -> Tensor:
        """Return logits [T - 1, V]: row i is a guess of token i + 2, from the tokens up to i + 1."""
        ids = torch.tensor([token_ids])
        hidden_1TD = self.model.model(ids).last_hidden_state[:, :-1]
        embedded_1TD = self.model.model.embed_tokens(ids[:, 1:])
        joined = torch.cat([self.embedding_norm(embedded_1TD), self.hidden_norm(hidden_1TD)], dim=-1)
        inputs = self.projection(joined)
        positions = torch.arange(inputs.shape[1])[None]
        mask = torch.full((inputs.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        output = self.layer(
            inputs,
            position_embeddings=self.model.model.rotary_emb(inputs, positions),
            position_ids=positions,
            attention_mask=mask,
        )
        hidden = output[0] if isinstance(output, tuple) else output
        return self.model.lm_head(self.norm(hidden))[0]

    def save(self, source: Path, folder: Path, names: Names) -> None:
        """Write the checkpoint in `source` with the layer added to it, named as such layers are published."""
        shutil.copytree(source, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
        tensors = load_file(folder / "model.safetensors")
        like, own, state = f"model.layers.{self.number}.", f"{names.layer}.", self.layer.state_dict()
        for name in [name for name in tensors if name.startswith(like)]:
            tensors[own + name.removeprefix(like)] = split(state, name.removeprefix(like))
        for name in ("embedding_norm", "hidden_norm", "projection", "norm"):
            tensors[f"{getattr(names, name)}.weight"] = getattr(self, name).weight.data
        if not own.startswith("mtp"):
            tensors[f"{own}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{own}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def split(state: dict[str, Tensor], name: str) -> Tensor:
    """Return a tensor of a checkpoint, which has each expert's matrices apart, from transformers' fused ones."""
    if name in state:
        return state[name].data.clone()
    before, _, after = name.partition("experts.")
    number, kind = after.split(".")[:2]
    fused = state[f"{before}experts.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"][int(number)]
    return fused.clone() if kind == "down_proj" else fused.chunk(2)[kind == "up_proj"].clone()


def with_layer(reference: Reference, folder: Path) -> DraftModel:
    draft = DraftModel(reference)
    draft.save(reference.folder, folder, names_of(reference))
    return draft


@pytest.mark.parametrize("max_num_batched_tokens", [2, 8, 64])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_the_published_layer(
    name: str, max_num_batched_tokens: int, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = reference_named(name)
    draft = with_layer(reference, tmp_path)
    given = dict(dtype="float32", kv_cache_memory="4MiB", max_model_len=96, num_threads=1, speculative_config=MTP)
    settings = parse_settings(given | {"max_num_batched_tokens": max_num_batched_tokens})
    config = resolve(settings, read_facts(tmp_path, with_draft_layer=True), MachineFacts(num_cores=1))
    worker = Worker(config, groups_of_one_rank(), show_progress=False)
    scheduler = new_scheduler(config, [worker.facts])
    (prompt,) = reference.prompts(20)
    params = RequestParams(temperature=0.0, max_tokens=24)
    scheduler.add(Request(request_id="0", prompt_token_ids=prompt, params=params, seed=0))
    tokens, drafted, number = list(prompt), {}, 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        intent = Intent(num_tokens=plan.num_tokens, is_decode_only=plan.is_decode_only)
        outcome = worker.execute(Round(row=make_row(intent, number=number, replica=0), plan=plan))
        assert outcome.result is not None
        (chunk,), number = outcome.result.chunks, number + 1
        tokens += chunk.token_ids
        drafted |= {len(tokens): token_id for token_id in chunk.draft_token_ids}  # by position
        scheduler.commit(outcome.result)
    assert len(drafted) > 10
    expected = draft.drafts(tokens)
    for position, token_id in drafted.items():
        logits_V = expected[position - 2]
        assert logits_V[token_id] >= logits_V.max() - 1e-4, position


def results_of(folder: Path, prompts: list[list[int]], **settings: Any) -> list[Any]:
    """Return tokens and log-probabilities, the second time with prompts in the prefix cache."""
    params = [
        SamplingParams(temperature=0.3 * (index % 2), seed=index, max_tokens=24, ignore_eos=True, logprobs=1)
        for index in range(len(prompts))
    ]
    settings = {"max_model_len": 96, "num_threads": 1, "kv_cache_memory": "8MiB", "block_size": 4} | settings
    with LLM(folder, **settings) as llm:
        outputs = [each.outputs[0] for _ in range(2) for each in llm.generate(prompts, params)]
        drafted = [each.speculation.num_draft_tokens for each in llm.session.engine.replica_stats]
        assert all(drafted) == ("speculative_config" in settings)
        return [(each.token_ids, each.logprobs) for each in outputs]


@pytest.mark.parametrize("name", NAMES)
def test_results_have_the_same_bytes(name: str, reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    reference = reference_named(name)
    with_layer(reference, tmp_path)
    prompts = reference.prompts(1, 20, 33, 64)
    expected = results_of(tmp_path, prompts)
    assert results_of(tmp_path, prompts, speculative_config=MTP) == expected
    few = {"max_num_batched_tokens": 9, "max_num_seqs": 3}
    assert results_of(tmp_path, prompts, speculative_config=MTP, **few) == expected


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=["tp2", "dp2"])
def test_layouts_give_the_same_bytes(
    layout: dict[str, int], reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    """The replicas of dp2 have different numbers of tokens, and one has none at the end."""
    reference = reference_named("deepseek-v3-four-heads")
    with_layer(reference, tmp_path)
    prompts = reference.prompts(20, 3, 33)
    expected = results_of(tmp_path, prompts)
    assert results_of(tmp_path, prompts, speculative_config=MTP, debug_rank_state=True, **layout) == expected


def test_drafts_that_are_right_by_design_are_accepted(
    reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Each token follows from the one before it, in the model and in its draft layer: 95% of drafts are right."""
    reference = reference_named("deepseek-v3")
    with_layer(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    size, vocab_size = reference.model.config.hidden_size, reference.vocab_size
    names = names_of(reference)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()  # hidden states are the embeddings
        elif "norm" in name:
            tensor.fill_(1.0)
    tokens = torch.nn.functional.normalize(tensors["model.embed_tokens.weight"], dim=1)
    following = [(7 * token_id + 3) % vocab_size for token_id in range(vocab_size)]
    tensors["lm_head.weight"][following] = tokens
    tensors[f"{names.projection}.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    save_file(tensors, tmp_path / "model.safetensors")
    with LLM(tmp_path, speculative_config=MTP, num_threads=1, max_model_len=128, kv_cache_memory="8MiB") as llm:
        params = SamplingParams(temperature=0, max_tokens=61, ignore_eos=True)
        outputs = llm.generate([[5], [9, 2, 40]], params)
        for output in outputs:
            last = output.prompt_token_ids[-1]
            assert output.outputs[0].token_ids == [last := following[last] for _ in range(61)]
        speculation = llm.session.engine.replica_stats[0].speculation
        assert speculation.num_draft_tokens == 60
        assert speculation.num_accepted_tokens >= 0.95 * speculation.num_draft_tokens


def test_settings_that_do_not_fit_are_refused(
    plain: Reference, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="multi-token prediction"):
        LLM(plain.folder, speculative_config=MTP)
    with_layer(reference_named("deepseek-v3"), tmp_path)
    with pytest.raises(SettingsError, match="num_speculative_tokens=3"):
        LLM(tmp_path, speculative_config=MTP | {"num_speculative_tokens": 3})
    with pytest.raises(SettingsError, match="pipeline_parallel_size"):
        LLM(tmp_path, speculative_config=MTP, pipeline_parallel_size=2)
