"""Layers for multi-token prediction: their drafts equal an independent model's, and no byte of a result changes."""

from __future__ import annotations

import copy
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
# Those whose modules differ from the layers of the decoder, or have other parts
SMALL_NAMES = (
    *("ling3", "mellum", "exaone-moe", "nemotron-h", "step3p7", "hy-v4", "glm5-next", "deepseek-v4", "dots3-note"),
)
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


def names_of(reference: Reference, number: int = 0) -> Names:
    """Return the names of a module. Those of Qwen3-Next have one."""
    config = reference.model.config.get_text_config()
    match config.model_type:
        case "qwen3_next" | "qwen3_5_moe_text" | "mellum" | "exaone_moe":
            assert number == 0
            return Names("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
        case "ernie4_5_moe":
            of_inputs = (f"model.mtp_{name}.{number}" for name in ("block", "emb_norm", "hidden_norm", "linear_proj"))
            return Names(*of_inputs, "model.norm")
        case "mimo_v2_flash":
            layer = f"model.mtp.layers.{number}"
            return Names(layer, f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.eh_proj", f"{layer}.final_layernorm")
        case "nemotron_h":
            layer, last = "mtp.layers.0", "mtp.layers.1"
            return Names(layer, f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.eh_proj", f"{last}.final_layernorm")
        case "deepseek_v4":
            layer = f"mtp.{number}"
            return Names(layer, f"{layer}.enorm", f"{layer}.hnorm", "", f"{layer}.norm")
    prefix = "model.language_model" if hasattr(reference.model.config, "text_config") else "model"
    layer = f"{prefix}.layers.{config.num_hidden_layers + number}"
    norm = "final_layernorm" if config.model_type in ("hy_v3", "hy_v4", "bailing_hybrid") else "shared_head.norm"
    if config.model_type == "hy_v4":
        layer = f"model.mtp_layers.{number}"
    if config.model_type == "step3p5":
        norm = f"transformer.{norm}"
    return Names(layer, f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.eh_proj", f"{layer}.{norm}")


class DraftModule(nn.Module):
    """A module as it was published, on top of transformers' model: norms and a projection of its own, and a decoder
    layer of the family.
    """

    def __init__(self, reference: Reference) -> None:
        super().__init__()
        text = reference.model.get_decoder()
        size = text.config.hidden_size
        is_dense = text.config.model_type == "ernie4_5_moe"
        self.number, like = next(  # the last layer with attention of its own and experts
            (number, layer)
            for number, layer in reversed(list(enumerate(text.layers)))
            if hasattr(layer, "self_attn")
            and getattr(layer.self_attn, "indexer", layer) is not None
            and hasattr(layer.mlp, "experts") != is_dense
        )
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
        self.text, self.logits = text, reference.model.lm_head

    def forward(self, ids_1T: Tensor, hidden_1TD: Tensor) -> Tensor:
        """Return hidden states [1, T, D] after the module's norm."""
        embedded_1TD = self.text.embed_tokens(ids_1T)
        normed = [self.embedding_norm(embedded_1TD), self.hidden_norm(hidden_1TD)]
        inputs_1TD = self.projection(torch.cat(normed, dim=-1))
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

    def tensors(self, stored: dict[str, Tensor], names: Names) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the module, named as such modules are published.

        Args:
            stored: the tensors of the model without it.
        """
        prefix = "model.language_model" if "model.language_model.embed_tokens.weight" in stored else "model"
        like, own, state = f"{prefix}.layers.{self.number}.", f"{names.layer}.", self.layer.state_dict()
        if own.startswith("model.mtp.layers"):
            yield from ((own + MIMO_NAMES.get(name, name), tensor) for name, tensor in state.items())
        else:
            for name in [name for name in stored if name.startswith(like)]:
                yield own + name.removeprefix(like), split(state, name.removeprefix(like))
        for name in ("embedding_norm", "hidden_norm", "projection", "norm"):
            yield f"{getattr(names, name)}.weight", getattr(self, name).weight.data
        if names.norm.endswith("shared_head.norm"):
            yield f"{own}embed_tokens.weight", stored["model.embed_tokens.weight"]
            yield f"{own}shared_head.head.weight", stored["lm_head.weight"]


# Configs of models whose layers are those of a module, in families whose modules differ from their decoder's layers.
FULL, SLIDING = "full_attention", "sliding_attention"
ONE = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}
SMALL_CONFIGS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": ONE | {"layer_types": [FULL], "mlp_layer_types": ["sparse"]},
    "mellum": ONE | {"layer_types": [SLIDING], "mlp_layer_types": ["sparse"]},
    "exaone_moe": ONE | {"layer_types": [SLIDING], "mlp_layer_types": ["dense"]},
    "nemotron_h": ONE | {"num_hidden_layers": 2, "layers_block_type": [FULL, "moe"]},
    "step3p5": ONE
    | {"layer_types": [SLIDING], "mlp_layer_types": ["dense"], "swiglu_limits": [0.0], "swiglu_limits_shared": [0.0]},
    "dots3_note_text": ONE | {"layer_types": [SLIDING], "mlp_layer_types": ["dense"]},
    "hy_v4": ONE | {"mlp_layer_types": ["sparse"], "indexer_types": ["full"], "layer_types": ["indexed_attention"]},
    "glm5_next_text": ONE
    | {"mlp_layer_types": ["sparse"], "indexer_types": ["full"], "layer_types": ["indexed_attention"]},
    "deepseek_v4": ONE | {"layer_types": [SLIDING], "mlp_layer_types": ["moe"]},
}
READ_BEFORE_NORM = ("step3p5", "deepseek_v4")


class NoConnection(nn.Module):
    """In the place of hyper-connections: one stream, which a network reads as it is, and its output is added to it."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes

    def forward(self, streams_1T1D: Tensor) -> Any:
        ones_1T1 = torch.ones(streams_1T1D.shape[:3])
        mixed = [ones_1T1[..., None]] if self.mixes else []
        return ones_1T1, *mixed, streams_1T1D[:, :, 0]


class FirstStream(nn.Module):
    def forward(self, streams_1T1D: Tensor) -> Tensor:
        return streams_1T1D[:, :, 0]


class SmallModule(nn.Module):
    """A module made of a small model of the family, whose layers and last norm are those of the module."""

    def __init__(self, reference: Reference) -> None:
        super().__init__()
        config = copy.deepcopy(reference.model.config)
        text = config.get_text_config()
        self.kind, self.hidden_size = text.model_type, text.hidden_size
        has_connections = self.kind in ("hy_v4", "glm5_next_text")
        changes = SMALL_CONFIGS[self.kind] | ({"hc_mult": 1} if has_connections else {})
        values = config.to_dict()
        of_text = values.get("text_config", values)
        own = of_text.pop("per_layer_config", None) or {}
        of_text.pop("is_heterogeneous", None)
        if self.kind == "dots3_note_text":
            changes |= {"per_layer_config": {"0": own[str(text.layer_types.index(SLIDING))]}}
        of_text.update(changes)
        config = type(config).from_dict(values)
        config._experts_implementation = config._attn_implementation = "eager"
        self.small = type(reference.model)(config)
        decoder = self.small.get_decoder()
        if has_connections:
            decoder.layers[0].attn_hc = decoder.layers[0].ffn_hc = NoConnection(self.kind != "hy_v4")
            decoder.hc_head = FirstStream()
        decoder.layers[0].register_forward_pre_hook(self._replace_input, with_kwargs=True)
        decoder.layers[-1].register_forward_hook(self._keep_output)
        norm = decoder.norm_f if self.kind == "nemotron_h" else decoder.norm
        epsilon = text.layer_norm_epsilon if self.kind == "nemotron_h" else text.rms_norm_eps
        self.embedding_norm, self.hidden_norm = (type(norm)(self.hidden_size, eps=epsilon) for _ in range(2))
        self.projection = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.normal_(float("norm" in name and bool(parameter.any())), 0.2)
            for name, buffer in self.named_buffers():
                if "correction" in name:
                    buffer.normal_(0.0, 0.3)
        has_embedding = self.kind == "dots3_note_text"
        self.embed = (self.small if has_embedding else reference.model).get_input_embeddings()
        self.head = self.small.lm_head if self.kind == "step3p5" else reference.model.lm_head

    def _replace_input(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.kind != "deepseek_v4":
            return None
        return (self.streams_1TSD, *args[1:]), kwargs

    def _keep_output(self, _: nn.Module, args: Any, output: Any) -> None:
        self.output = output

    def forward(self, ids_1T: Tensor, hidden_1TX: Tensor) -> Tensor:
        embedded_1TSD = self.embedding_norm(self.embed(ids_1T))[:, :, None]
        normed_1TSD = self.hidden_norm(hidden_1TX.unflatten(2, (-1, self.hidden_size)))
        both = torch.cat([embedded_1TSD.expand_as(normed_1TSD), normed_1TSD], dim=-1)
        self.streams_1TSD = self.projection(both)
        normed_1TD = self.small.model(inputs_embeds=self.streams_1TSD[:, :, 0]).last_hidden_state
        return self.output.flatten(2) if self.kind in READ_BEFORE_NORM else normed_1TD

    def logits(self, hidden_1TX: Tensor) -> Tensor:
        decoder = self.small.get_decoder()
        if self.kind == "step3p5":
            hidden_1TX = decoder.norm(hidden_1TX)
        if self.kind == "deepseek_v4":
            hidden_1TX = decoder.norm(decoder.hc_head(hidden_1TX.unflatten(2, (-1, self.hidden_size))))
        return self.head(hidden_1TX)

    def tensors(self, stored: dict[str, Tensor], names: Names) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the module, named as such modules are published."""
        with tempfile.TemporaryDirectory() as folder:
            self.small.save_pretrained(folder)
            own = load_file(f"{folder}/model.safetensors")
        for name, tensor in own.items():
            if found := re.search(r"\blayers\.(\d+)\.(.*)", name):
                layer = names.layer if self.kind != "nemotron_h" else f"mtp.layers.{found[1]}"
                yield f"{layer}.{found[2]}", tensor
            elif re.search(r"(^|\.)norm(_f)?\.weight$", name):
                yield f"{names.norm}.weight", tensor
            elif found := re.search(r"\bhc_head\W?(?:hc_)?(\w+)$", name):
                yield f"{names.layer}.hc_head_{found[1]}", tensor
            elif self.kind == "dots3_note_text" and name.endswith("embed_tokens.weight"):
                yield "model.mtp.embed_tokens.weight", tensor
            elif self.kind == "step3p5" and name.endswith("lm_head.weight"):
                yield f"{names.norm.removesuffix('norm')}output.weight", tensor
        yield f"{names.embedding_norm}.weight", self.embedding_norm.weight.data
        yield f"{names.hidden_norm}.weight", self.hidden_norm.weight.data
        if self.kind == "deepseek_v4":
            yield f"{names.layer}.e_proj.weight", self.projection.weight.data[:, : self.hidden_size]
            yield f"{names.layer}.h_proj.weight", self.projection.weight.data[:, self.hidden_size :]
            yield f"{names.layer}.emb.tok_emb.weight", self.embed.weight.data
            yield f"{names.layer}.head.weight", self.head.weight.data
        else:
            yield f"{names.projection}.weight", self.projection.weight.data


class DraftModel(nn.Module):
    """Transformers' model with modules, and its embedding and head."""

    def __init__(self, reference: Reference, num_modules: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind = reference.model.config.get_text_config().model_type
        of_kind = SmallModule if self.kind in SMALL_CONFIGS else DraftModule
        self.draft_modules = [of_kind(reference).eval() for _ in range(num_modules)]
        self.model = reference.model
        self.eval()

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """Return logits [len(drafts), V]: row i is a guess of the token after `token_ids` and i drafts.

        The guesses of all modules are followed by the modules' states at one position each, as if the model had
        computed them.
        """
        ids = torch.tensor([[*token_ids, *drafts]])
        first_1TD = self._hidden(ids[:, : len(token_ids)])[:, :-1]
        guesses: list[Tensor] = []
        while len(guesses) < len(drafts):
            hidden_1TD, last = first_1TD, []
            for number, module in enumerate(self.draft_modules[: len(drafts) - len(guesses)], 1):
                hidden_1TD = module(ids[:, number : number + hidden_1TD.shape[1]], hidden_1TD)
                last.append(hidden_1TD[:, -1:])
                guesses.append(module.logits(last[-1])[0, 0])
            first_1TD = torch.cat([first_1TD, *last], dim=1)
        return torch.stack(guesses)

    def _hidden(self, ids_1T: Tensor) -> Tensor:
        """Return the hidden states that the first module reads."""
        outputs: list[Tensor] = []
        keep = self.model.get_decoder().layers[-1].register_forward_hook(lambda *given: outputs.append(given[2]))
        normed_1TD = self.model.model(ids_1T).last_hidden_state
        keep.remove()
        return outputs[0].flatten(2) if self.kind in READ_BEFORE_NORM else normed_1TD

    def save(self, reference: Reference, folder: Path) -> None:
        """Write the checkpoint of the model with the modules added to it."""
        shutil.copytree(reference.folder, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        counted: dict[str, Any] = {"num_nextn_predict_layers": len(self.draft_modules)}
        if self.kind == "step3p5":
            types = {"layer_types": SLIDING, "mlp_layer_types": "dense"}
            counted |= {f"mtp_{key}": [value] * len(self.draft_modules) for key, value in types.items()}
        config.get("text_config", config).update(counted)
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        for number, module in enumerate(self.draft_modules):
            tensors |= dict(module.tensors(tensors, names_of(reference, number)))
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


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


def with_modules(reference: Reference, folder: Path, num_modules: int = 1) -> DraftModel:
    draft = DraftModel(reference, num_modules)
    draft.save(reference, folder)
    return draft


@pytest.mark.slow_but("deepseek-v3-1-2", "deepseek-v3-3-3", "qwen3-next-1-64", "deepseek-v4")
@pytest.mark.parametrize(
    ("name", "num_modules", "max_num_batched_tokens"),
    [
        *((name, 1, 8) for name in (*NAMES, *OTHER_NAMES, *SMALL_NAMES)),
        ("deepseek-v3", 1, 2),
        ("qwen3-next", 1, 64),
        *(("deepseek-v3", number, size) for number, size in ((2, 1), (2, 2), (3, 3), (4, 64))),
        *(
            (name, number, 8)
            for name, number in (("deepseek-v32", 2), ("ernie", 3), ("mimo-v2-flash", 3), ("hy-v3", 2))
        ),
    ],
)
def test_drafts_are_those_of_the_published_modules(
    name: str,
    num_modules: int,
    max_num_batched_tokens: int,
    reference_named: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    reference = reference_named(name)
    draft = with_modules(reference, tmp_path, num_modules)
    given: dict[str, Any] = dict(dtype="float32", kv_cache_memory="4MiB", max_model_len=96, num_threads=1, block_size=4)
    settings = parse_settings(given | {"speculative_config": MTP, "max_num_batched_tokens": max_num_batched_tokens})
    config = resolve(settings, read_facts(tmp_path, num_drafts=3), MachineFacts(num_cores=1))
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
        result = worker.execute(Round(row=make_row(intent, number=number, replica=0), plan=plan))
        assert result.result is not None
        (chunk,), number = result.result.chunks, number + 1
        tokens += chunk.token_ids
        if chunk.token_ids:
            drafts = chunk.draft_token_ids
            logits_NV = draft.logits(tokens, drafts)
            highest_N = logits_NV.max(dim=1).values
            assert (logits_NV.gather(1, torch.tensor(drafts)[:, None])[:, 0] >= highest_N - 1e-4).all(), len(tokens)
            num_drafts.append(len(drafts))
        scheduler.commit(result.result)
    assert num_drafts[:10] == [3] * 10
    # At the end, a request may have no blocks for modules that run on positions behind the last token.
    assert (num_drafts[-1] < 3) == (num_modules < 3)


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


@pytest.mark.slow_but("deepseek-v3-")
@pytest.mark.parametrize(
    ("name", "num_modules"), [*((name, 1) for name in (*NAMES, *SMALL_NAMES)), ("mimo-v2-flash", 3), ("step3p7", 3)]
)
def test_results_have_the_same_bytes(
    name: str, num_modules: int, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = reference_named(name)
    with_modules(reference, tmp_path, num_modules)
    prompts = reference.prompts(1, 20, 33, 64)
    expected = results_of(tmp_path, prompts)
    assert results_of(tmp_path, prompts, speculative_config=MTP) == expected
    few = {"max_num_batched_tokens": 9, "max_num_seqs": 3, "max_concurrent_batches": 2}
    assert results_of(tmp_path, prompts, speculative_config=MTP, **few) == expected


@pytest.mark.slow_but("tp2]")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("layout", "name", "num_modules"),
    [
        ({"tensor_parallel_size": 2}, "deepseek-v3-four-heads", 1),
        ({"data_parallel_size": 2}, "deepseek-v3-four-heads", 1),
        (
            {"data_parallel_size": 2, "overlap_decode_tokens": 2, "overlap_prefill_tokens": 8},
            "deepseek-v3-four-heads",
            1,
        ),
        ({"pipeline_parallel_size": 2}, "deepseek-v3-four-heads", 1),
        ({"pipeline_layers": [3, 1], "pipeline_parallel_size": 2}, "deepseek-v3-four-heads", 1),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 2, "max_num_batched_tokens": 9},
            "deepseek-v3-four-heads",
            2,
        ),
        pytest.param(
            {"pipeline_layers": [3, 3], "pipeline_parallel_size": 2},
            "deepseek-v3-four-heads",
            3,
            marks=pytest.mark.slow,
        ),
        pytest.param({"tensor_parallel_size": 2, "data_parallel_size": 2}, "step3p7", 2, marks=pytest.mark.slow),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "deepseek-v4", 1),
        pytest.param({"tensor_parallel_size": 2}, "dots3-note", 1, marks=pytest.mark.slow),
        pytest.param(
            {"pipeline_parallel_size": 2, "executor": "ray"}, "deepseek-v3-four-heads", 1, marks=pytest.mark.soak
        ),
    ],
    ids=[
        "tp2",
        "dp2",
        "dp2-overlap",
        "pp2",
        "pp2-draft-alone",
        "tp2-dp2-modules",
        "pp2-modules-alone",
        "tp2-dp2-step",
        "tp2-dp2-v4",
        "tp2-dots3",
        "pp2-ray",
    ],
)
def test_layouts_give_the_same_bytes(
    layout: dict[str, Any],
    name: str,
    num_modules: int,
    reference_named: Callable[[str], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replicas of dp2 have different numbers of tokens, and one has none at the end."""
    monkeypatch.setenv("RAY_ADDRESS", "local")  # other tests may have started a cluster of several hosts
    reference = reference_named(name)
    with_modules(reference, tmp_path, num_modules)
    prompts = reference.prompts(20, 3, 33)
    expected = results_of(tmp_path, prompts)
    assert results_of(tmp_path, prompts, speculative_config=MTP, debug_rank_state=True, **layout) == expected


def with_right_modules(reference: Reference, folder: Path, num_modules: int = 1, *, others: float = 0.0) -> list[int]:
    """Write a model whose next token, and that of its modules, follows from the last token. Return what follows each.

    Args:
        others: the share that all else has in the hidden states. The model and its modules then differ sometimes.
    """
    with_modules(reference, folder, num_modules)
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
    for number in range(num_modules):
        tensors[f"{names_of(reference, number).projection}.weight"] = projection.clone()
    save_file(tensors, folder / "model.safetensors")
    return following


@pytest.mark.parametrize(("num_drafts", "num_modules"), [(1, 1), (3, 1), (1, 2), (3, 3), (5, 2)])
def test_drafts_that_are_right_by_design_are_accepted(
    num_drafts: int, num_modules: int, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Each token follows from the one before it, in the model and in its modules: 95% of drafts are right."""
    following = with_right_modules(reference_named("deepseek-v3"), tmp_path, num_modules)
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
