"""Models that run with transformers' modelling code: `model_impl="transformers"`.

transformers allows a caller to register functions that replace attention and experts. Ours attend over the paged KV
cache, and dispatch tokens to the experts of all ranks. Everything else, such as norms, routers, shared experts and the
LM head, runs in transformers' code and is replicated on every rank. Such a model is not batch-invariant.

A trial run on the meta device, which computes nothing, determines the model's shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeserve.errors import CheckpointError, missing_extra
from moeserve.kv.layer_cache import CacheItems, CacheNeeds, Places
from moeserve.layers.build_context import BuildContext
from moeserve.layers.dense.network import DenseSpec
from moeserve.layers.grouped_query.attention import AttentionSpec, key_value_items, make_key_value_cache
from moeserve.layers.moe.dispatch.base import PackedTokens
from moeserve.layers.moe.dispatch.factory import DispatcherFactory
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.placement.load import ExpertLoad
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.moe.router import Routing
from moeserve.layers.rotary import NO_ROTARY, Rotaries
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops import attention as attention_operations
from moeserve.ops import pairs
from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.ops.routing.interface import RouterSpec
from moeserve.step_inputs import StepInputs

_numbers = itertools.count()  # numbers the models of this process, because transformers registers functions by name

Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]  # (module, 1NTH, 1GTH, 1GTV, settings)
RunExperts = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # (module, TD, experts TK, weights TK) -> TD


def family_of(architecture: str) -> Family:
    """Return a family for a model that transformers implements and moeserve does not."""
    return Family(name=f"transformers' {architecture}", architecture=architecture, read=read_shape)


def read_shape(config: ConfigValues) -> ModelSpec:
    """Return the shape of a checkpoint's model, by a trial run without weights.

    Raises:
        CheckpointError: transformers does not know the architecture, or the model needs a feature that the replaced
            attention and experts functions cannot express. The error names the feature.
        SettingsError: transformers is not installed.
    """
    layers: list[Layer] = []
    attentions: list[AttentionSpec] = []
    experts: dict[int, MoESpec] = {}
    refuse = _Refusal(config.path)

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> Tensor:
        attentions.append(_attention_config(module, query, key, value, settings, refuse))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def run_experts(module: Any, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        weight = module.down_proj
        width = weight.shape[1 if module.is_transposed else 2]
        router = RouterSpec(num_experts=len(weight), top_k=experts_TK.shape[1])
        experts[len(attentions) - 1] = MoESpec(router=router, expert_width=width)
        return torch.empty_like(hidden_TD)

    model = _build(config.path.parent, attend, run_experts, torch.device("meta"), None)
    text = model.config.get_text_config()
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        model(input_ids=ids, position_ids=ids, attention_mask=_no_mask(ids.device), use_cache=False)
    except CheckpointError:
        raise
    except Exception as error:  # modelling code can raise any exception
        raise refuse(
            f"its code cannot be traced, perhaps because its experts do not use transformers' experts interface "
            f"({type(error).__name__}: {error})"
        ) from error
    if len(attentions) != text.num_hidden_layers:
        raise refuse(
            f"{text.num_hidden_layers - len(attentions)} of its {text.num_hidden_layers} layers have no attention"
        )
    if not experts:
        raise refuse("none of its layers has experts behind transformers' experts interface")
    for number, attention in enumerate(attentions):
        layers.append(Layer.of(attention, experts.get(number, DenseSpec(width=0))))
    return ModelSpec(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        layers=tuple(layers),
        norm_epsilon=getattr(text, "rms_norm_eps", 1e-5),
        max_position_embeddings=text.max_position_embeddings,
        tie_word_embeddings=text.tie_word_embeddings,
    )


class _Refusal:
    """A factory of the errors for models that this implementation cannot run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: model_impl='transformers' does not support this model: {why}")


def _attention_config(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any], refuse: _Refusal
) -> AttentionSpec:
    """Return the shape of the attention that a module calls."""
    if value.shape[:3] != key.shape[:3] or value.shape[3] > key.shape[3]:
        raise refuse(f"its values have the shape {list(value.shape)}, and its keys {list(key.shape)}")
    if not (settings.get("is_causal", True) and getattr(module, "is_causal", True)):
        raise refuse("its attention is not causal")
    for name in ("softcap", "position_bias", "cu_seq_lens_q"):
        if settings.get(name) is not None:
            raise refuse(f"its attention has {name}={settings[name]!r}")
    return AttentionSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        rotary=NO_ROTARY,  # modelling code has already rotated queries and keys
        window=settings.get("sliding_window"),
        scale=settings.get("scaling"),
        has_sinks=settings.get("s_aux") is not None,
    )


def _build(
    folder: Path, attend: Attend, run_experts: RunExperts, device: torch.device, dtype: torch.dtype | None
) -> Any:
    """Return transformers' model, with these functions as attention and experts. On the meta device, load no weights.

    Raises:
        CheckpointError: transformers does not know the model, or cannot load it.
        SettingsError: transformers is not installed.
    """
    try:
        import transformers
        from transformers.integrations.moe import ExpertsInterface
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise missing_extra("model_impl='transformers'", "transformers", error) from None

    def attention_function(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **settings: Any
    ) -> tuple[Tensor, None]:
        return attend(module, query, key, value, settings), None

    name = f"moeserve-{next(_numbers)}"
    AttentionInterface.register(name, attention_function)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    ExpertsInterface.register(name, run_experts)
    implementations = {"attn_implementation": name, "experts_implementation": name}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if device.type == "meta":
            with device:
                model = transformers.AutoModelForCausalLM.from_config(config, **implementations)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, **implementations
            )
    except Exception as error:  # any type: reading configs and weights can raise any exception
        raise _Refusal(folder / "config.json")(f"{type(error).__name__}: {error}") from error
    if not model._supports_attention_backend:
        raise _Refusal(folder / "config.json")("its attention does not use transformers' attention interface")
    return model.eval()


@dataclass
class _Current:
    """The step that the model is computing, and its caches."""

    step: StepInputs
    caches: Sequence[KeyValueCache]


class ForeignExperts(nn.Module):
    """The experts of one layer on this rank, with transformers' activation and our dispatch."""

    def __init__(
        self, module: Any, placement: Placement, dispatchers: DispatcherFactory, context: BuildContext
    ) -> None:
        """Keep the weights of this rank's experts in a transformers module, and free those of all other experts."""
        super().__init__()
        rank = dispatchers.group.rank_in_group
        self.load = ExpertLoad(placement, rank, context)
        self.dispatcher = dispatchers.make(placement)
        self.pairs = pairs.make(context.backend)
        own = torch.tensor(placement.logical_of_slot[rank])
        for name, parameter in list(module.named_parameters(recurse=False)):
            if len(parameter) == placement.num_logical:
                setattr(module, name, nn.Parameter(parameter[own], requires_grad=False))

    def is_capturable(self, tokens_per_rank: Sequence[int]) -> bool:
        """Return False, because the number of rows of each expert is read on the host."""
        return False

    def run(self, module: Any, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> Tensor:
        """Return the weighted outputs [T, D] of the chosen experts. Collective: all ep ranks."""
        dispatched = self.dispatcher.dispatch(hidden_TD, routing, step).wait()
        tokens = dispatched.tokens
        assert isinstance(tokens, PackedTokens), type(tokens)
        self.load.count(tokens.groups.counts_e)
        rows_RD: Any = tokens.rows_RD
        if tokens.gather is not None:
            rows_RD = self.pairs.gather(rows_RD, tokens.gather.indices_R, tokens.gather.divisor)
        output_RD = torch.zeros_like(rows_RD) if tokens.out_RD is None else tokens.out_RD
        start = 0
        for expert, num_rows in enumerate(tokens.groups.counts_e.tolist()):
            rows = slice(start, start := start + num_rows)
            output_RD[rows] = self._run_expert(module, expert, rows_RD[rows])
        return dispatched.combine(output_RD).wait()

    @staticmethod
    def _run_expert(module: Any, expert: int, rows_RD: Tensor) -> Tensor:
        """Return the outputs [R, D] of one expert, computed as in transformers."""

        def linear(name: str, rows: Tensor) -> Tensor:
            weight = getattr(module, name)[expert]
            bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
            return functional.linear(rows, weight.T if module.is_transposed else weight, bias)

        if module.has_gate:
            middle = module._apply_gate(linear("gate_up_proj", rows_RD))
        else:
            middle = module.act_fn(linear("up_proj", rows_RD))
        output: Tensor = linear("down_proj", middle)
        return module.post_expert_norm(output) if module.has_post_expert_norm else output


class TransformersModel(nn.Module):
    """A `RankModel` that runs transformers' code.

    Args:
        folder: the checkpoint. Each rank loads it completely, and then keeps only its own experts.
        config: the result of `read_shape`.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelSpec,
        placements: Sequence[Placement],
        dispatchers: DispatcherFactory,
        context: BuildContext,
    ) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.groups = context.groups
        self.dispatchers = dispatchers
        self.stage = range(len(config.layers))
        self._current: _Current | None = None
        networks = [(number, each) for number, layer in enumerate(config.layers) for each in layer.networks]
        self._attentions = [network for _, network in networks if isinstance(network, AttentionSpec)]
        self.layers_of_caches = [number for number, network in networks if isinstance(network, AttentionSpec)]
        self._backends = [
            attention_operations.make(context.backend, _shape_of(attention, context)) for attention in self._attentions
        ]
        self._rotaries = Rotaries(frozenset({NO_ROTARY}), context.device, context.max_model_len)
        model = _build(folder, self._attend, self._run_experts, torch.device("cpu"), context.dtype)
        modules = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
        numbers = [number for number, layer in enumerate(config.layers) if layer.moes]
        self.moe_layers = {
            number: ForeignExperts(module, placement, dispatchers, context)
            for number, module, placement in zip(numbers, modules, placements, strict=True)
        }
        self._layer_of_experts = dict(zip(modules, self.moe_layers.values(), strict=True))
        self.base = getattr(model, model.base_model_prefix).to(context.device)
        self.head = _head_alone(model.to(context.device))

    @property
    def cache_needs(self) -> CacheNeeds:
        """The cache memory that all layers need together."""
        block_size = self.context.block_size
        return CacheNeeds.of(itertools.chain(*self.cache_items), self.config.cache_rules(block_size), block_size)

    @property
    def cache_items(self) -> list[tuple[CacheItems, ...]]:
        """For each layer, its cache items: blocks of keys and values."""
        return [key_value_items(each, slice(0, each.num_kv_heads), self.context) for each in self._attentions]

    def make_caches(self, places: Places) -> list[KeyValueCache]:
        """Return one cache for each layer."""
        return [make_key_value_cache(config, config.num_kv_heads, places, self.context) for config in self._attentions]

    def with_one_layer_of_each_kind(self) -> TransformersModel:
        """Return the model itself, because the layers of a transformers model cannot be separated."""
        return self

    def is_capturable(self, tokens_per_rank: Sequence[int]) -> bool:
        """Return False, because `ForeignExperts` cannot be captured in a CUDA graph."""
        return False

    def forward(self, step: StepInputs, caches: Sequence[KeyValueCache]) -> Tensor:
        """Return hidden states [T, D] of all tokens of the replica, after the final norm. Collective: all ep ranks."""
        self._current = _Current(step, caches)
        # Modelling code cannot run without tokens, but this rank's experts may receive tokens of other ranks.
        tokens_T, positions_T = (x if len(x) else x.new_zeros(1) for x in (step.token_ids, step.positions))
        try:
            output = self.base(
                input_ids=tokens_T[None],
                position_ids=positions_T[None],
                attention_mask=_no_mask(step.positions.device),
                use_cache=False,
            )
        finally:
            self._current = None
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD[: len(step.token_ids)]

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return the logits [T, V] of hidden states, including transformers' soft caps and scale factors."""
        logits_TV: Tensor = self.head(inputs_embeds=hidden_TD[None]).logits[0]
        return logits_TV

    def _attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> Tensor:
        """Return the attended values [1, T, N, V] for transformers."""
        assert self._current is not None
        step, cache = self._current.step, self._current.caches[module.layer_idx]
        if len(step.token_ids) == 0:
            return query.new_zeros(1, 1, query.shape[1], value.shape[3])
        backend = self._backends[module.layer_idx]
        step = step.of_group(cache.group)
        query_TNH, key_TGH, value_TGV = (heads[0].transpose(0, 1).contiguous() for heads in (query, key, value))
        rotation = self._rotaries.at(step.positions)[NO_ROTARY]
        query_TNH = backend.rotate_and_write(query_TNH, key_TGH, value_TGV, rotation, cache, step)
        sinks_N = settings.get("s_aux")
        attended_TNV = backend.attend(query_TNH, cache, step, None if sinks_N is None else sinks_N.float())
        return attended_TNV[None]

    def _run_experts(self, module: Any, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        assert self._current is not None
        step = self._current.step
        num_tokens = len(step.token_ids)
        routing = Routing(experts_TK[:num_tokens].long(), weights_TK[:num_tokens].float())
        if step.padding is not None:
            routing = routing.without(step.padding)
        output_TD = self._layer_of_experts[module].run(module, hidden_TD[:num_tokens], routing, step)
        return output_TD if num_tokens else torch.zeros_like(hidden_TD)


def _shape_of(config: AttentionSpec, context: BuildContext) -> AttentionShape:
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_dim,
        value_size=config.value_dim,
        dtype=context.dtype,
        scale=config.head_dim**-0.5 if config.scale is None else config.scale,
        window=config.window,
        has_sinks=config.has_sinks,
    )


def _no_mask(device: torch.device) -> Tensor:
    """Return an unused four-dimensional mask, which prevents transformers from building one."""
    return torch.empty(1, 1, 1, 1, device=device)


@dataclass
class _Output:
    """The output of a model's layers, for transformers' LM head. All fields except the hidden states are None."""

    last_hidden_state: Tensor

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """A replacement of a model's layers that returns the hidden states it is called with."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        return _Output(inputs_embeds)


def _head_alone(model: Any) -> Any:
    """Return a transformers model without its layers, which computes logits from hidden states."""
    setattr(model, model.base_model_prefix, _Given())
    return model
