"""Layers for multi-token prediction: their drafts equal an independent model's, and no byte of a result changes."""

from __future__ import annotations

import copy
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
from moeserve.config.facts import MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.engine.base import new_scheduler
from moeserve.models.registry import read_facts
from moeserve.protocol import Request
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import Intent, Round, make_row
from moeserve.worker.worker import Worker

MTP = {"method": "mtp", "num_speculative_tokens": 3}
# One without recurrent states, one with; one that picks positions, and one whose layer is dense and has no norm.
NAMES = ("deepseek-v3", "qwen3-next", "deepseek-v32", "ernie")
OTHER_NAMES = ("glm4-moe", "glm4-moe-lite", "glm5", "hy-v3", "qwen3.5-moe", "mimo-v2-flash")

# Parts of names in checkpoints, and in transformers
HY_V3_NAMES = {"router.gate": "gate", "expert_bias": "e_score_correction_bias", "shared_mlp": "shared_experts"}
# Names in transformers, and in checkpoints
MIMO_NAMES = {
    "self_attn.sinks": "self_attn.attention_sink_bias",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
}


@dataclass(frozen=True)
class Names:
    """Where a family's checkpoints have the parts of the layer."""

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str


def names_of(reference: Reference) -> Names:
    config = reference.model.config.get_text_config()
    match config.model_type:
        case "qwen3_next" | "qwen3_5_moe_text":
            return Names("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
        case "ernie4_5_moe":
            of_inputs = (f"model.mtp_{name}.0" for name in ("block", "emb_norm", "hidden_norm", "linear_proj"))
            return Names(*of_inputs, "model.norm")
        case "mimo_v2_flash":
            layer = "model.mtp.layers.0"
            return Names(layer, f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.eh_proj", f"{layer}.final_layernorm")
    layer = f"model.layers.{config.num_hidden_layers}"
    norm = "final_layernorm" if config.model_type == "hy_v3" else "shared_head.norm"
    return Names(layer, f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.eh_proj", f"{layer}.{norm}")


class DraftModel(nn.Module):
    """The layer as it was published, on top of transformers' model: norms and a projection of its own, a decoder layer
    of the family, and the model's embedding and head.
    """

    def __init__(self, reference: Reference) -> None:
        super().__init__()
        model, text = reference.model, reference.model.get_decoder()
        size = text.config.hidden_size
        is_dense = text.config.model_type == "ernie4_5_moe"
        self.number, like = next(  # the last layer with attention of its own and experts
            (number, layer)
            for number, layer in reversed(list(enumerate(text.layers)))
            if hasattr(layer, "self_attn")
            and getattr(layer.self_attn, "indexer", layer) is not None
            and hasattr(layer.mlp, "experts") != is_dense
        )
        torch.manual_seed(3)
        config = copy.deepcopy(text.config)
        if config.model_type == "mimo_v2_flash":  # without experts, whose tensors have other names
            config.mlp_layer_types[self.number] = "dense"
        self.layer = type(like)(config, self.number)
        norm_type, epsilon = type(like.input_layernorm), text.config.rms_norm_eps
        self.embedding_norm, self.hidden_norm, self.norm = (norm_type(size, eps=epsilon) for _ in range(3))
        self.projection = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.normal_(float("norm" in name and bool(parameter.any())), 0.2)
            for name, buffer in self.named_buffers():
                if "correction" in name:
                    buffer.normal_(0.0, 0.3)
        if is_dense:
            self.norm = text.norm
        self.model, self.text = model, text
        self.eval()

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """Return logits [len(drafts), V]: row i is a guess of the token after `token_ids` and i drafts."""
        ids = torch.tensor([token_ids])
        inputs_1TD = self._inputs(ids[:, 1:], self.model.model(ids).last_hidden_state[:, :-1])
        guesses = []
        for draft in drafts:
            hidden_11D = self._output(inputs_1TD)[:, -1:]
            guesses.append(self.model.lm_head(hidden_11D)[0, 0])
            inputs_1TD = torch.cat([inputs_1TD, self._inputs(torch.tensor([[draft]]), hidden_11D)], dim=1)
        return torch.stack(guesses)

    def _inputs(self, ids_1T: Tensor, hidden_1TD: Tensor) -> Tensor:
        embedded_1TD = self.text.embed_tokens(ids_1T)
        return self.projection(torch.cat([self.embedding_norm(embedded_1TD), self.hidden_norm(hidden_1TD)], dim=-1))

    def _output(self, inputs_1TD: Tensor) -> Tensor:
        """Return hidden states [1, T, D] after the layer's norm."""
        positions = torch.arange(inputs_1TD.shape[1])[None]
        mask, layer_type = torch.full((inputs_1TD.shape[1],) * 2, float("-inf")).triu(1), []
        if self.text.config.model_type == "mimo_v2_flash":
            assert self.layer.self_attn.layer_type == "sliding_attention"
            layer_type = [self.layer.self_attn.layer_type]
            mask += torch.full_like(mask, float("-inf")).tril(-self.layer.self_attn.sliding_window)
        output = self.layer(
            inputs_1TD,
            position_embeddings=self.text.rotary_emb(inputs_1TD, positions, *layer_type),
            position_ids=positions,
            attention_mask=mask[None, None],
        )
        return self.norm(output[0] if isinstance(output, tuple) else output)

    def save(self, source: Path, folder: Path, names: Names) -> None:
        """Write the checkpoint in `source` with the layer added to it, named as such layers are published."""
        shutil.copytree(source, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
        tensors = load_file(folder / "model.safetensors")
        prefix = "model.language_model" if "model.language_model.embed_tokens.weight" in tensors else "model"
        like, own, state = f"{prefix}.layers.{self.number}.", f"{names.layer}.", self.layer.state_dict()
        if own.startswith("model.mtp.layers"):
            tensors |= {own + MIMO_NAMES.get(name, name): tensor.clone() for name, tensor in state.items()}
            tensors["model.mtp.layers.1.enorm.weight"] = torch.ones(3)  # of a second layer, which is not loaded
        else:
            for name in [name for name in tensors if name.startswith(like)]:
                tensors[own + name.removeprefix(like)] = split(state, name.removeprefix(like))
        for name in ("embedding_norm", "hidden_norm", "projection", "norm"):
            tensors[f"{getattr(names, name)}.weight"] = getattr(self, name).weight.data
        if names.norm.endswith("shared_head.norm"):
            tensors[f"{own}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{own}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def split(state: dict[str, Tensor], name: str) -> Tensor:
    """Return a tensor of a checkpoint, which has each expert's matrices apart, from transformers' fused ones."""
    for published, own in HY_V3_NAMES.items():
        name = name.replace(published, own)
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


@pytest.mark.parametrize(
    ("name", "max_num_batched_tokens"),
    [*((name, 8) for name in (*NAMES, *OTHER_NAMES)), ("deepseek-v3", 2), ("qwen3-next", 64)],
)
def test_drafts_are_those_of_the_published_layer(
    name: str, max_num_batched_tokens: int, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = reference_named(name)
    draft = with_layer(reference, tmp_path)
    given: dict[str, Any] = dict(dtype="float32", kv_cache_memory="4MiB", max_model_len=96, num_threads=1, block_size=4)
    settings = parse_settings(given | {"speculative_config": MTP, "max_num_batched_tokens": max_num_batched_tokens})
    config = resolve(settings, read_facts(tmp_path, with_draft_layer=True), MachineFacts(num_cores=1))
    worker = Worker(config, groups_of_one_rank(), show_progress=False)
    scheduler = new_scheduler(config, [worker.facts])
    (prompt,) = reference.prompts(20)
    params = RequestParams(temperature=0.0, max_tokens=24)
    scheduler.add(Request(request_id="0", prompt_token_ids=prompt, params=params, seed=0))
    tokens, number, num_drafts = list(prompt), 0, []
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        intent = Intent(num_tokens=plan.num_tokens, is_decode_only=False, num_sampling=plan.num_sampling)
        outcome = worker.execute(Round(row=make_row(intent, number=number, replica=0), plan=plan))
        assert outcome.result is not None
        (chunk,), number = outcome.result.chunks, number + 1
        tokens += chunk.token_ids
        if chunk.token_ids:
            drafts = chunk.draft_token_ids
            logits_NV = draft.logits(tokens, drafts)
            highest_N = logits_NV.max(dim=1).values
            assert (logits_NV.gather(1, torch.tensor(drafts)[:, None])[:, 0] >= highest_N - 1e-4).all(), len(tokens)
            num_drafts.append(len(drafts))
        scheduler.commit(outcome.result)
    assert num_drafts[:10] == [3] * 10
    assert num_drafts[-1] < 3, "the request has no block for drafts behind its last token"


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
    few = {"max_num_batched_tokens": 9, "max_num_seqs": 3, "max_concurrent_batches": 2}
    assert results_of(tmp_path, prompts, speculative_config=MTP, **few) == expected


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"data_parallel_size": 2, "overlap_decode_tokens": 2, "overlap_prefill_tokens": 8},
        {"pipeline_parallel_size": 2},
        {"pipeline_layers": [3, 1], "pipeline_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2, "executor": "ray"}, marks=pytest.mark.soak),
    ],
    ids=["tp2", "dp2", "dp2-overlap", "pp2", "pp2-draft-alone", "pp2-ray"],
)
def test_layouts_give_the_same_bytes(
    layout: dict[str, Any],
    reference_named: Callable[[str], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replicas of dp2 have different numbers of tokens, and one has none at the end."""
    monkeypatch.setenv("RAY_ADDRESS", "local")  # other tests may have started a cluster of several hosts
    reference = reference_named("deepseek-v3-four-heads")
    with_layer(reference, tmp_path)
    prompts = reference.prompts(20, 3, 33)
    expected = results_of(tmp_path, prompts)
    assert results_of(tmp_path, prompts, speculative_config=MTP, debug_rank_state=True, **layout) == expected


def with_right_layer(reference: Reference, folder: Path, *, others: float = 0.0) -> list[int]:
    """Write a model whose next token, and whose draft layer's, follows from the last token. Return what follows each.

    Args:
        others: the share that all else has in the hidden states. The model and its draft layer then differ sometimes.
    """
    with_layer(reference, folder)
    tensors = load_file(folder / "model.safetensors")
    size, vocab_size = reference.model.config.hidden_size, reference.vocab_size
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= others  # with 0, hidden states are the embeddings
        elif "norm" in name:
            tensor.fill_(1.0)
    tokens = torch.nn.functional.normalize(tensors["model.embed_tokens.weight"], dim=1)
    following = [(7 * token_id + 3) % vocab_size for token_id in range(vocab_size)]
    tensors["lm_head.weight"][following] = tokens
    projection = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    tensors[f"{names_of(reference).projection}.weight"] = projection
    save_file(tensors, folder / "model.safetensors")
    return following


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_that_are_right_by_design_are_accepted(
    num_drafts: int, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Each token follows from the one before it, in the model and in its draft layer: 95% of drafts are right."""
    following = with_right_layer(reference_named("deepseek-v3"), tmp_path)
    config = {"method": "mtp", "num_speculative_tokens": num_drafts}
    with LLM(tmp_path, speculative_config=config, num_threads=1, max_model_len=128, kv_cache_memory="8MiB") as llm:
        params = SamplingParams(temperature=0, max_tokens=61, ignore_eos=True)
        outputs = llm.generate([[5], [9, 2, 40]], params)
        for output in outputs:
            last = output.prompt_token_ids[-1]
            assert output.outputs[0].token_ids == [last := following[last] for _ in range(61)]
        speculation = llm.session.engine.replica_stats[0].speculation
        # After its first token, a request gets one more than the drafts in each step.
        num_steps = -(-60 // (num_drafts + 1))
        assert speculation.num_drafts == 2 * num_steps
        assert min(speculation.num_accepted_per_position) >= 0.95 * speculation.num_drafts
        assert len(speculation.num_accepted_per_position) == num_drafts


def test_settings_that_do_not_fit_are_refused(
    plain: Reference, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="multi-token prediction"):
        LLM(plain.folder, speculative_config=MTP)
