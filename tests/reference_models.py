"""Random tiny checkpoints of every family, and what transformers makes of them in float32. Does not know moeserve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

# What a reference must withstand for its tokens to be well defined: see Reference.is_clear.
SMALLEST_GAP = 4e-3  # between the two largest logits; float32 results differ by less than 1e-4
ROUTER_NOISE = 3e-5  # relative to each value that a router sees; float32 results differ by about 1e-6

DEFAULTS: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    max_position_embeddings=512,
    initializer_range=0.25,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


# Thetas beside "yarn" are small, so that some of the few frequencies lie between its two ends.
def rotary(rope_type: str = "default", rope_theta: float = 10000.0, **settings: Any) -> dict[str, Any]:
    return dict(rope_type=rope_type, rope_theta=rope_theta, **settings)


@dataclass(frozen=True)
class Shape:
    """One configuration of a family, and the seed of its weights."""

    family: str  # transformers' name of the model class, without ForCausalLM
    settings: dict[str, Any]
    seed: int = 0

    def config(self) -> Any:
        config = getattr(transformers, f"{self.family}Config")(**(DEFAULTS | self.settings))
        config.architectures = [f"{self.family}ForCausalLM"]
        return config

    def model(self) -> Any:
        return getattr(transformers, f"{self.family}ForCausalLM")(self.config())


MIXTRAL = {
    "mixtral": Shape(
        "Mixtral",
        dict(num_local_experts=4, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2),
        seed=5,
    ),
    # 5 experts top-3, 6 heads with 2 key-value heads, tied embeddings, heads of 20 values where 48 / 6 would be 8
    "mixtral-odd": Shape(
        "Mixtral",
        dict(
            num_local_experts=5,
            num_experts_per_tok=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=20,
            hidden_size=48,
            intermediate_size=37,
            vocab_size=131,
            tie_word_embeddings=True,
        ),
        seed=5,
    ),
    "mixtral-window": Shape(
        "Mixtral",
        dict(
            num_local_experts=3,
            num_experts_per_tok=1,
            num_attention_heads=3,
            num_key_value_heads=3,
            hidden_size=36,
            sliding_window=11,
            num_hidden_layers=3,
        ),
    ),
    "mixtral-llama3-rotary": Shape(
        "Mixtral",
        dict(
            num_local_experts=2,
            num_experts_per_tok=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            rope_parameters=rotary(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
    ),
}

DEEPSEEK_V2 = {
    # V2-Lite: queries are not compressed, the best experts of all, whatever group they are in
    "deepseek-v2-lite": Shape(
        "DeepseekV2",
        dict(
            initializer_range=0.2,
            hidden_size=36,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=3,
            q_lora_rank=None,
            kv_lora_rank=20,
            qk_nope_head_dim=10,
            qk_rope_head_dim=6,
            v_head_dim=14,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_shared_experts=2,
            moe_intermediate_size=13,
            first_k_dense_replace=1,
            topk_method="greedy",
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.0,
            max_position_embeddings=1280,
            rope_parameters=rotary(
                "yarn",
                factor=40,
                mscale=0.707,
                mscale_all_dim=0.707,
                beta_fast=32,
                beta_slow=1,
                original_max_position_embeddings=32,
            ),
        ),
        seed=3,
    ),
    # V2: compressed queries, experts of the best 2 of 3 groups, and cosines and sines that are scaled as well
    "deepseek-v2": Shape(
        "DeepseekV2",
        dict(
            hidden_size=40,
            num_attention_heads=5,
            num_key_value_heads=5,
            q_lora_rank=18,
            kv_lora_rank=24,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=9,
            n_routed_experts=12,
            num_experts_per_tok=4,
            n_shared_experts=1,
            moe_intermediate_size=17,
            first_k_dense_replace=0,
            topk_method="group_limited_greedy",
            n_group=3,
            topk_group=2,
            routed_scaling_factor=2.5,
            max_position_embeddings=1280,
            rope_parameters=rotary(
                "yarn",
                200.0,
                factor=40,
                mscale=1.0,
                mscale_all_dim=0.707,
                beta_fast=32,
                beta_slow=1,
                original_max_position_embeddings=32,
            ),
        ),
        seed=5,
    ),
    # norms with an epsilon that shows: those of the compressed queries and latents do not use it
    "deepseek-v2-plain-rotary": Shape(
        "DeepseekV2",
        dict(
            hidden_size=33,
            vocab_size=127,
            num_attention_heads=3,
            num_key_value_heads=3,
            q_lora_rank=16,
            kv_lora_rank=18,
            qk_nope_head_dim=6,
            qk_rope_head_dim=10,
            v_head_dim=12,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_shared_experts=2,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            topk_method="group_limited_greedy",
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.5,
            rms_norm_eps=0.01,
            tie_word_embeddings=True,
            rope_parameters=rotary(rope_theta=500.0),
        ),
        seed=3,
    ),
}

DEEPSEEK_V3 = {
    # V3 and R1: experts of the best 2 of 4 groups, 3 dense layers in front
    "deepseek-v3": Shape(
        "DeepseekV3",
        dict(
            initializer_range=0.2,
            hidden_size=40,
            num_hidden_layers=4,
            num_attention_heads=5,
            num_key_value_heads=5,
            q_lora_rank=18,
            kv_lora_rank=28,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=10,
            n_routed_experts=12,
            num_experts_per_tok=5,
            n_shared_experts=1,
            moe_intermediate_size=19,
            first_k_dense_replace=3,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            max_position_embeddings=1280,
            rope_parameters=rotary(
                "yarn",
                100.0,
                factor=40,
                mscale=1.0,
                mscale_all_dim=1.0,
                beta_fast=32,
                beta_slow=1,
                original_max_position_embeddings=32,
            ),
        ),
        seed=1,
    ),
    # Kimi and Moonlight: one group, queries that are not compressed, and a ramp of rotary frequencies without a width
    "kimi": Shape(
        "DeepseekV3",
        dict(
            initializer_range=0.2,
            hidden_size=36,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=3,
            q_lora_rank=None,
            kv_lora_rank=21,
            qk_nope_head_dim=9,
            qk_rope_head_dim=6,
            v_head_dim=11,
            n_routed_experts=12,
            num_experts_per_tok=5,
            n_shared_experts=1,
            moe_intermediate_size=15,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.827,
            max_position_embeddings=1024,
            rope_parameters=rotary(
                "yarn",
                50.0,
                factor=32.0,
                mscale=1.0,
                mscale_all_dim=1.0,
                beta_fast=1.0,
                beta_slow=1.0,
                original_max_position_embeddings=32,
            ),
        ),
        seed=8,
    ),
    # half-split rotary embedding, biases, weights that do not sum to one
    "deepseek-v3-odd": Shape(
        "DeepseekV3",
        dict(
            hidden_size=33,
            vocab_size=127,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=19,
            qk_nope_head_dim=8,
            qk_rope_head_dim=10,
            v_head_dim=13,
            n_routed_experts=6,
            num_experts_per_tok=2,
            n_shared_experts=2,
            moe_intermediate_size=18,
            first_k_dense_replace=0,
            n_group=2,
            topk_group=1,
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            rope_interleave=False,
            attention_bias=True,
            rms_norm_eps=0.01,
            tie_word_embeddings=True,
            rope_parameters=rotary(rope_theta=500.0),
        ),
    ),
}

QWEN2_MOE = {
    "qwen2-moe": Shape(
        "Qwen2Moe",
        dict(
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=21,
            shared_expert_intermediate_size=40,
            mlp_only_layers=[1],
            norm_topk_prob=False,
            qkv_bias=True,
            rope_parameters=rotary(rope_theta=1e6),
        ),
        seed=8,
    ),
    # every second layer has experts, and the second and third a window
    "qwen2-moe-window": Shape(
        "Qwen2Moe",
        dict(
            hidden_size=36,
            vocab_size=131,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=3,
            num_experts=7,
            num_experts_per_tok=3,
            moe_intermediate_size=18,
            shared_expert_intermediate_size=27,
            decoder_sparse_step=2,
            norm_topk_prob=True,
            qkv_bias=True,
            use_sliding_window=True,
            sliding_window=9,
            layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            tie_word_embeddings=True,
            rope_parameters=rotary(),
        ),
    ),
}

QWEN3_MOE = {
    "qwen3-moe": Shape(
        "Qwen3Moe",
        dict(
            hidden_size=40,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=10,
            num_experts=9,
            num_experts_per_tok=4,
            moe_intermediate_size=17,
            mlp_only_layers=[1],
            norm_topk_prob=True,
            attention_bias=False,
            rope_parameters=rotary("yarn", 500.0, factor=16.0, original_max_position_embeddings=32),
        ),
        seed=0,
    ),
    "qwen3-moe-window": Shape(
        "Qwen3Moe",
        dict(
            rms_norm_eps=0.01,
            hidden_size=36,
            vocab_size=127,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=22,
            norm_topk_prob=False,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=9,
            tie_word_embeddings=True,
            rope_parameters=rotary(),
        ),
        seed=0,
    ),
}

OLMOE = {
    # queries, keys and values beyond 0.8 are cut off
    "olmoe": Shape(
        "Olmoe",
        dict(
            intermediate_size=19,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=7,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            clip_qkv=0.8,
            rope_parameters=rotary(),
        ),
        seed=6,
    ),
    "olmoe-odd": Shape(
        "Olmoe",
        dict(
            rms_norm_eps=0.01,
            hidden_size=30,
            vocab_size=131,
            intermediate_size=26,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=3,
            num_experts=5,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters=rotary(rope_theta=500.0),
        ),
        seed=1,
    ),
}

GLM4_MOE = {
    "glm4-moe": Shape(
        "Glm4Moe",
        dict(
            hidden_size=40,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=12,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_shared_experts=1,
            moe_intermediate_size=17,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            use_qk_norm=True,
            attention_bias=True,
            rope_parameters=rotary(rope_theta=1e6, partial_rotary_factor=0.5),
        ),
        seed=11,
    ),
    "glm4-moe-groups": Shape(
        "Glm4Moe",
        dict(
            rms_norm_eps=0.01,
            initializer_range=0.2,
            hidden_size=36,
            vocab_size=127,
            num_hidden_layers=4,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=16,
            n_routed_experts=9,
            num_experts_per_tok=4,
            n_shared_experts=2,
            moe_intermediate_size=14,
            first_k_dense_replace=2,
            n_group=3,
            topk_group=2,
            norm_topk_prob=False,
            routed_scaling_factor=1.25,
            use_qk_norm=False,
            attention_bias=False,
            tie_word_embeddings=True,
            rope_parameters=rotary(partial_rotary_factor=0.25),
        ),
        seed=1,
    ),
}

GPT_OSS = {
    "gpt-oss": Shape(
        "GptOss",
        dict(
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=10,
            intermediate_size=24,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=7,
            swiglu_limit=2.0,
            max_position_embeddings=1024,
            rope_parameters=rotary(
                "yarn",
                150.0,
                factor=32.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=32,
            ),
        ),
        seed=1,
    ),
    "gpt-oss-odd": Shape(
        "GptOss",
        dict(
            hidden_size=36,
            vocab_size=131,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=8,
            intermediate_size=21,
            num_local_experts=4,
            num_experts_per_tok=3,
            sliding_window=7,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            swiglu_limit=1.5,
            tie_word_embeddings=True,
            rope_parameters=rotary(),
        ),
        seed=20,
    ),
}

# Heads that can be divided over 4 tp ranks, where those of their families above cannot.
DIVISIBLE = {
    "deepseek-v3-four-heads": Shape(
        "DeepseekV3",
        DEEPSEEK_V3["deepseek-v3"].settings
        | dict(num_hidden_layers=3, first_k_dense_replace=1, num_attention_heads=4, num_key_value_heads=4),
        seed=1,
    ),
    "qwen3-moe-eight-heads": Shape(
        "Qwen3Moe",
        QWEN3_MOE["qwen3-moe"].settings | dict(num_attention_heads=8, num_key_value_heads=2),
        seed=1,
    ),
}

SHAPES = MIXTRAL | DEEPSEEK_V2 | DEEPSEEK_V3 | QWEN2_MOE | QWEN3_MOE | OLMOE | GLM4_MOE | GPT_OSS


class Reference:
    """A checkpoint on disk and the transformers model that wrote it."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder = folder
        self.model = model
        self.vocab_size: int = model.config.vocab_size
        self._continuations: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """What transformers' own greedy search appends to a prompt."""
        key = (num_tokens, *prompt)
        if key not in self._continuations:
            self._continuations[key] = self._search(prompt, num_tokens)
        return self._continuations[key]

    def _search(self, prompt: list[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[T, vocab_size] float32"""
        with torch.no_grad():
            return self.model(torch.tensor([token_ids])).logits[0]

    def smallest_gap(self, prompt: list[int], continuation: list[int]) -> float:
        """How far greedy search was from choosing another token than it did: between the two largest logits."""
        largest = self.logits(prompt + continuation[:-1])[len(prompt) - 1 :].topk(2, dim=-1)
        assert largest.indices[:, 0].tolist() == continuation
        return float((largest.values[:, 0] - largest.values[:, 1]).min())

    def experts(self, token_ids: list[int]) -> list[torch.Tensor]:
        """[T, K], of each layer that has experts: those that the router chose for each token."""
        chosen: list[torch.Tensor] = []
        hooks = [
            router.register_forward_hook(lambda router, arguments, output: chosen.append(output[2]))
            for router in self._routers()
        ]
        self.logits(token_ids)
        for hook in hooks:
            hook.remove()
        return chosen

    def expert_counts(self, sequences: Sequence[list[int]]) -> list[list[int]]:
        """By layer that has experts, by expert: how many tokens of all sequences chose it."""
        num_experts = len(self._routers()[0].weight)
        layers = zip(*map(self.experts, sequences), strict=True)
        return [sum(chosen.flatten().bincount(minlength=num_experts) for chosen in layer).tolist() for layer in layers]

    def _routers(self) -> list[nn.Module]:
        routers = [module for module in self.model.modules() if type(module).__name__.endswith("Router")]
        assert routers
        return routers

    def num_undecided(self, token_ids: list[int]) -> int:
        """How many tokens, in all layers, would change experts if what the routers see was off by ROUTER_NOISE."""
        generator = torch.Generator().manual_seed(0)
        undecided = []

        def compare(router: nn.Module, arguments: tuple[torch.Tensor], output: tuple[torch.Tensor, ...]) -> None:
            (hidden,) = arguments
            experts = output[2].sort(dim=-1).values
            for _ in range(8):
                noise = ROUTER_NOISE * torch.randn(hidden.shape, generator=generator)
                others = router.forward(hidden * (1 + noise))[2].sort(dim=-1).values
                undecided.append(int((experts != others).any(-1).sum()))

        hooks = [router.register_forward_hook(compare) for router in self._routers()]
        self.logits(token_ids)
        for hook in hooks:
            hook.remove()
        return sum(undecided)

    def prompts(self, *lengths: int, seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(3, self.vocab_size, (length,), generator=generator).tolist() for length in lengths]

    def is_clear(self, prompt: list[int], num_tokens: int) -> bool:
        """Whether neither its greedy tokens nor the choices of experts on the way are a matter of rounding."""
        continuation = self.greedy(prompt, num_tokens)
        is_separated = self.smallest_gap(prompt, continuation) > SMALLEST_GAP
        return is_separated and self.num_undecided(prompt + continuation) == 0

    def clear_prompts(
        self, lengths: Sequence[int], num_tokens: int, *, beginning: Sequence[int] = ()
    ) -> list[list[int]]:
        """Clear prompts of these lengths. Those longer than `beginning` begin with it."""
        prompts: list[list[int]] = []
        for seed in range(100 + 20 * len(lengths)):
            if len(prompts) == len(lengths):
                return prompts
            length = lengths[len(prompts)]
            (rest,) = self.prompts(length, seed=seed)
            prompt = ([*beginning, *rest] if length > len(beginning) else rest)[:length]
            if self.is_clear(prompt, num_tokens):
                prompts.append(prompt)
        raise AssertionError("hardly any prompt is clear")


def fill_what_transformers_leaves_plain(model: nn.Module) -> None:
    """Random values for norms, biases and sinks, which begin as ones and zeros and would hide their absence."""
    state = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()
    }
    with torch.no_grad():
        for name, tensor in state.items():
            if "norm" in name and tensor.dim() == 1:
                tensor.normal_(1.0, 0.2)
            elif name.endswith("sinks"):
                tensor.normal_(0.0, 1.0)
            elif name.endswith("bias"):
                tensor.normal_(0.0, 0.3)


def make_reference(folder: Path, shape: Shape) -> Reference:
    """A random checkpoint, in the layout in which its family is published."""
    torch.manual_seed(shape.seed)
    model = shape.model().eval()
    fill_what_transformers_leaves_plain(model)
    model.config._experts_implementation = "eager"  # transformers' faster ones refuse odd widths
    model.config._attn_implementation = "eager"
    model.save_pretrained(folder)
    return Reference(folder, model)


def save_large_mixtral(folder: Path, *, hidden_size: int, expert_width: int, **saving: Any) -> None:
    """A bfloat16 checkpoint of 8 layers with 8 experts, for those who measure memory."""
    config = transformers.MixtralConfig(
        vocab_size=1000,
        hidden_size=hidden_size,
        intermediate_size=expert_width,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=8,
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        transformers.MixtralForCausalLM(config).save_pretrained(folder, **saving)
    finally:
        torch.set_default_dtype(torch.float32)


def in_the_style_of_the_hub(values: dict[str, Any]) -> dict[str, Any]:
    """A config.json of transformers 5 as those on the hub are written: older names, and keys that only some have."""
    values = {key: value for key, value in values.items() if key not in ("qk_head_dim", "transformers_version")}
    family = values["architectures"][0].removesuffix("ForCausalLM")
    scaling = values.pop("rope_parameters")
    values["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        values["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    values["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    values["torch_dtype"] = values.pop("dtype", "float32")

    if family.startswith("Deepseek"):
        if values["rope_scaling"]:
            scaling["type"] = scaling.pop("rope_type")
        routing = {"DeepseekV2": ("softmax", values.get("topk_method")), "DeepseekV3": ("sigmoid", "noaux_tc")}
        values["scoring_func"], values["topk_method"] = routing[family]
        values |= dict(moe_layer_freq=1, ep_size=1, aux_loss_alpha=0.001, seq_aux=True)
        values["auto_map"] = {"AutoModelForCausalLM": f"modeling_deepseek.{family}ForCausalLM"}
        unheard_of = ["head_dim", "mlp_bias"]
        if values.get("rope_interleave"):
            unheard_of.append("rope_interleave")
    elif family == "Qwen2Moe":
        values |= dict(max_window_layers=21)
        unheard_of = ["qkv_bias"]
        if not values["use_sliding_window"]:
            values["sliding_window"] = 32768
            unheard_of.append("layer_types")
    elif family == "Qwen3Moe":
        values |= dict(num_experts=values.pop("num_local_experts"), max_window_layers=48)
        unheard_of = []
    elif family == "GptOss":
        values |= dict(experts_per_token=values["num_experts_per_tok"], initial_context_length=32)
        unheard_of = ["swiglu_alpha"]
        if values["layer_types"] == (["sliding_attention", "full_attention"] * 99)[: values["num_hidden_layers"]]:
            unheard_of.append("layer_types")  # what transformers takes where nothing is said
    else:
        unheard_of = []
    return {key: value for key, value in values.items() if key not in unheard_of}
