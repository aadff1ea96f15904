"""Resolution of settings to an `EngineConfig`: every "auto" is resolved, and contradictory settings are refused."""

from __future__ import annotations

import dataclasses
import logging
from typing import Literal, cast, get_args

from moeserve.config.devices import DEVICES
from moeserve.config.engine_config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    FailureConfig,
    ParallelConfig,
    ScheduleConfig,
    TelemetryConfig,
    TextConfig,
    WeightsConfig,
)
from moeserve.config.facts import INSTALL_COMPILER, CheckpointFacts, Facts, MachineFacts, from_settings
from moeserve.config.resolve_cache import resolve_cache, resolve_store
from moeserve.config.resolve_experts import resolve_experts
from moeserve.config.resolve_parallel import resolve_parallel, threads_per_rank
from moeserve.config.settings import (
    DEFAULT_LOAD_WINDOW,
    AttentionChoice,
    DtypeName,
    ModelSettings,
    ProductChoice,
    QuantizationName,
    Settings,
    SpeculativeConfig,
    StoredFormatName,
)
from moeserve.config.validation import parse_bytes, parse_length
from moeserve.errors import SettingsError, shown

logger = logging.getLogger(__name__)

_DTYPE_OF_ALIAS = {"half": "float16", "float": "float32"}


def resolve(
    settings: Settings,
    checkpoint: CheckpointFacts,
    machine: MachineFacts,
    *,
    expert_loads: tuple[tuple[float, ...], ...] = (),
    placements: tuple[str, ...] = (),
) -> EngineConfig:
    """Return the engine's config for these settings.

    Args:
        expert_loads: contents of the file `settings.parallel.expert_loads`: for each sparse layer, the load of each
            expert.
        placements: contents of the placement file that `settings.parallel.rebalance` names, for each sparse layer.

    Raises:
        SettingsError: the settings contradict each other, the checkpoint or the machine.
    """
    facts = Facts(checkpoint, machine, DEVICES["cpu" if settings.model.device == "auto" else settings.model.device])
    model = dataclasses.replace(settings.model, quantization=_own_quantization(settings.model.quantization, facts))
    settings = dataclasses.replace(settings, model=model)
    weights = resolve_weights(model, facts)
    _check_device(model, facts, weights)
    _check_needs(settings, facts)
    parallel = resolve_parallel(settings.parallel, facts)
    if model.batch_invariant:
        _check_batch_invariant(settings, facts, weights)
    if model.model_impl == "transformers":
        _check_transformers(settings)
    schedule = resolve_schedule(settings, facts)
    cache = resolve_cache(settings.cache, facts, schedule)
    return EngineConfig(
        weights=weights,
        texts=resolve_texts(model, facts),
        compute=resolve_compute(settings, facts, weights, cache, parallel),
        cache=cache,
        store=resolve_store(settings.cache),
        schedule=schedule,
        parallel=parallel,
        experts=resolve_experts(settings, facts, weights, schedule, expert_loads, placements),
        failure=resolve_failure(settings, parallel),
        telemetry=resolve_telemetry(settings, facts),
    )


def resolve_weights(model: ModelSettings, facts: Facts) -> WeightsConfig:
    """Return the checkpoint and the formats in which it is loaded.

    Args:
        model: its quantization is not that of the checkpoint.

    Raises:
        SettingsError: the checkpoint or the device does not support a format.
    """
    quantization = cast(QuantizationName | None, model.quantization)
    dtype = cast(DtypeName, _DTYPE_OF_ALIAS.get(model.dtype, model.dtype))
    if model.dtype == "auto":
        dtype = _dtype_of_checkpoint(facts, quantization)
    keeps_mxfp4 = facts.checkpoint.has_mxfp4 and dtype == "bfloat16" and _has_mxfp4_kernels(facts)
    if quantization is None and keeps_mxfp4:
        quantization = "mxfp4"
    if quantization == "mxfp4":
        _check_mxfp4(facts, dtype)
    elif quantization is not None:
        _check_quantization(quantization, facts, dtype)
    return from_settings(
        WeightsConfig,
        model,
        model_path=facts.checkpoint.path,
        hub_model=None,
        model_impl="moeserve" if model.model_impl == "auto" else model.model_impl,
        dtype=dtype,
        quantization=quantization,
        packed_cache=parse_bytes("packed_cache", model.packed_cache, least=0),
        seed=model.seed or 0,
    )


def resolve_texts(model: ModelSettings, facts: Facts) -> TextConfig:
    """Return the tokenizer, and the defaults of sampling parameters."""
    return TextConfig(
        tokenizer_path=model.tokenizer or facts.checkpoint.path,
        hub_tokenizer=None,
        vocab_size=facts.checkpoint.vocab_size,
        has_generation_config=model.generation_config == "auto",
        override_generation_config=tuple((model.override_generation_config or {}).items()),
    )


def resolve_compute(
    settings: Settings, facts: Facts, weights: WeightsConfig, cache: CacheConfig, layout: ParallelConfig
) -> DeviceConfig:
    """Return the device of each rank, and the kernels that it uses.

    Raises:
        SettingsError: the attention backend does not support the KV cache.
    """
    model, parallel, machine = settings.model, settings.parallel, facts.machine
    if cache.has_float8_cache and model.attention_backend not in ("auto", "triton"):
        raise SettingsError(
            f"attention_backend={model.attention_backend!r} cannot read the scales of "
            f"kv_cache_dtype={settings.cache.kv_cache_dtype!r}; use attention_backend='triton'"
        )
    # Libraries support neither scales per cached row nor a fixed order of additions. FlashInfer's wrappers are planned
    # for one step at a time, so steps in halves cannot use it either.
    overlaps = (parallel.overlap_decode_tokens, parallel.overlap_prefill_tokens) != (None, None)
    may_use_libraries = facts.on_gpu and not (cache.has_float8_cache or model.batch_invariant or overlaps)
    attention: AttentionChoice = "measured" if may_use_libraries else "triton"
    product: ProductChoice = "measured" if weights.quantization == "fp8" else "triton"
    return from_settings(
        DeviceConfig,
        model,
        device=facts.device.name,
        attention_backend=attention if model.attention_backend == "auto" else model.attention_backend,
        product_backend=product if model.product_backend == "auto" else model.product_backend,
        enforce_eager=settings.scheduler.enforce_eager or model.model_impl == "transformers",
        num_threads=parallel.num_threads or threads_per_rank(machine.cores_of_nodes or (machine.num_cores,), parallel),
        numa_binding=parallel.numa_binding and layout.executor == "mp" and not facts.on_gpu,
    )


def resolve_schedule(settings: Settings, facts: Facts) -> ScheduleConfig:
    """Return the limits of requests and steps.

    Raises:
        SettingsError: the model does not support them.
    """
    scheduler, speculation = settings.scheduler, settings.scheduler.speculative_config
    longest, most = (
        parse_length("max_model_len", settings.model.max_model_len),
        facts.checkpoint.max_position_embeddings,
    )
    if longest is not None and longest > most:
        raise SettingsError(
            f"max_model_len={longest} is more than the model's longest context ({most} tokens); choose at most that"
        )
    if speculation is not None:
        _check_speculation(speculation, facts.checkpoint)
    # Planning ahead needs ranks that know the tokens they sample. With pipeline stages, the last stage samples the
    # tokens that the first stage needs. With draft tokens, even the number of new tokens is unknown.
    num_stages = settings.parallel.pipeline_parallel_size
    plans_ahead = scheduler.async_scheduling and num_stages == 1 and speculation is None
    return from_settings(
        ScheduleConfig,
        scheduler,
        max_model_len=longest or most,
        max_model_len_may_shrink=longest is None,
        max_num_seqs=scheduler.max_num_seqs or facts.device.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens or facts.device.max_num_batched_tokens,
        async_scheduling=plans_ahead,
        max_concurrent_batches=scheduler.max_concurrent_batches or (2 if plans_ahead else num_stages),
    )


def resolve_failure(settings: Settings, layout: ParallelConfig) -> FailureConfig:
    """Return the limits of time, and what follows a failure."""
    parallel = settings.parallel
    by_default: Literal["end", "restart"] = "restart" if layout.executor == "ray" else "end"
    on_failure = by_default if parallel.on_failure == "auto" else parallel.on_failure
    debug_rank_state = settings.scheduler.debug_rank_state
    return from_settings(FailureConfig, parallel, on_failure=on_failure, debug_rank_state=debug_rank_state)


def resolve_telemetry(settings: Settings, facts: Facts) -> TelemetryConfig:
    """Return the reports of expert load.

    Raises:
        SettingsError: the model has no experts.
    """
    telemetry = settings.telemetry
    is_needed = settings.parallel.rebalance == "auto" or (telemetry.expert_load_file, telemetry.metrics_port) != (
        None,
        None,
    )
    if is_needed and not facts.checkpoint.num_sparse_layers:
        raise SettingsError(
            "rebalance, expert_load_file and metrics_port need a model with experts, and this one has none"
        )
    window = telemetry.expert_load_window or (DEFAULT_LOAD_WINDOW if is_needed else 0)
    return from_settings(TelemetryConfig, telemetry, expert_load_window=window)


def _own_quantization(name: str | None, facts: Facts) -> QuantizationName | None:
    """Return the setting without the name of the checkpoint's own format, which is read as it is by default.

    Raises:
        SettingsError: the name is that of another format of checkpoints.
    """
    stored_as = facts.checkpoint.quantization
    has_kernels = name == "mxfp4" or (name == "fp8" and facts.on_gpu and facts.machine.has_float8)
    if name == stored_as and not has_kernels:
        return None
    if name in get_args(StoredFormatName):
        stored = "not quantised" if stored_as is None else f"stored as {stored_as!r}"
        raise SettingsError(f"quantization={name!r}, but the checkpoint's weights are {stored}; leave quantization out")
    return cast(QuantizationName | None, name)


def _dtype_of_checkpoint(facts: Facts, quantization: str | None) -> DtypeName:
    """Return the dtype to compute in if the user chooses none: the checkpoint's, unless that is slow."""
    checkpoint = facts.checkpoint
    if checkpoint.dtype != "float16" or (facts.on_gpu and quantization not in DEVICES["cpu"].quantizations):
        return checkpoint.dtype
    dtype: DtypeName = "bfloat16" if facts.machine.has_kernels or facts.on_gpu else "float32"
    logger.warning(
        "%s has weights in float16, for which there are no fast kernels here; computing in %s, unless "
        "dtype='float16' is set",
        checkpoint.path,
        dtype,
    )
    return dtype


def _has_mxfp4_kernels(facts: Facts) -> bool:
    """Return True if there are kernels for experts in MXFP4, so that these need not be dequantised."""
    return facts.machine.has_triton if facts.on_gpu else facts.machine.has_kernels


def _check_mxfp4(facts: Facts, dtype: DtypeName) -> None:
    """Raise SettingsError if quantization="mxfp4" is impossible."""
    if not facts.checkpoint.has_mxfp4:
        raise SettingsError(
            f"quantization='mxfp4' keeps experts that are stored in MXFP4, and {facts.checkpoint.path} has none; use "
            "'int8' or 'int4' on CPUs, or 'fp8' on GPUs"
        )
    if dtype == "float16" or not _has_mxfp4_kernels(facts):
        raise SettingsError(
            "quantization='mxfp4' needs dtype='bfloat16' or 'float32', and the C++ kernels (CPU) or triton (GPU); here "
            f"dtype={dtype!r} and device={facts.device.name!r}. Leave quantization out to dequantise the weights"
        )


def _check_quantization(name: QuantizationName, facts: Facts, dtype: DtypeName) -> None:
    """Raise SettingsError if weights cannot be quantised while they are loaded."""
    what = f"quantization={name!r}"
    if name not in facts.device.quantizations:
        if facts.on_gpu:
            raise SettingsError(f"{what} is for CPUs, and device='cuda'; use 'fp8' on GPUs, or device='cpu'")
        raise SettingsError(f"{what} is for GPUs, and device='cpu'; use 'int8' or 'int4' on CPUs")
    if facts.on_gpu and not facts.machine.has_float8:
        raise SettingsError(
            f"{what} needs triton (pip install 'moeserve[cuda]') and a GPU of compute capability 8.9 or more, such as "
            "H100; leave quantization out"
        )
    if not facts.on_gpu and dtype == "float16":
        raise SettingsError(f"{what} does not support dtype='float16'; use dtype='bfloat16' or 'float32'")
    if not facts.on_gpu and not facts.machine.has_kernels:
        raise SettingsError(
            f"{what} needs the C++ kernels, and moeserve was installed without them; leave quantization out, or "
            f"{INSTALL_COMPILER}"
        )


def _check_device(model: ModelSettings, facts: Facts, weights: WeightsConfig) -> None:
    """Raise SettingsError if the device is missing, or does not support the model, the dtype or a backend."""
    device, needs = facts.device.name, facts.checkpoint.needs
    if facts.on_gpu and not facts.machine.has_cuda:
        raise SettingsError("device='cuda', but torch sees no CUDA device; use device='cpu' or device='auto'")
    if facts.on_gpu and weights.dtype == "bfloat16" and not facts.machine.has_bfloat16:
        source = ", the checkpoint's," if model.dtype == "auto" else ""
        raise SettingsError(
            f"dtype='bfloat16'{source} needs a GPU of compute capability 8.0 or more, such as A100; use "
            "dtype='float16' or 'float32'"
        )
    if model.attention_backend != "auto" and not facts.on_gpu:
        raise SettingsError(
            f"attention_backend={model.attention_backend!r} is for GPUs, and device={device!r}; use 'auto'"
        )
    if model.product_backend == "deep_gemm" and weights.quantization != "fp8":
        raise SettingsError(
            "product_backend='deep_gemm' multiplies 8-bit blocks on GPUs, and "
            f"device={device!r}, quantization={weights.quantization!r}; use 'auto'"
        )
    if facts.on_gpu and needs.without_gpu_kernels is not None:
        raise SettingsError(
            f"device='cuda': {needs.without_gpu_kernels}, which this model has, has no kernels for GPUs yet; use "
            "device='cpu'"
        )


def _check_needs(settings: Settings, facts: Facts) -> None:
    """Raise SettingsError for settings that the networks of a model do not support."""
    needs, parallel = facts.checkpoint.needs, settings.parallel
    if facts.on_gpu and settings.model.batch_invariant and needs.without_gpu_order is not None:
        raise SettingsError(
            f"batch_invariant=True: on GPUs, {needs.without_gpu_order}, which this model has, have no kernels whose "
            "sums have one order; leave it out or use device='cpu'"
        )
    if not needs.redoes_drafts or settings.scheduler.speculative_config is None:
        return
    if facts.on_gpu:
        raise SettingsError(
            "speculative_config: on GPUs, the kernels for compressed entries would keep the state of rejected draft "
            "tokens; leave it out or use device='cpu'"
        )
    if parallel.overlap_decode_tokens or parallel.overlap_prefill_tokens:
        raise SettingsError(
            "speculative_config: with overlap_decode_tokens or overlap_prefill_tokens, draft tokens could be in both "
            "halves of a step, and this model keeps no state after the first of them; leave one of the settings out"
        )


def _check_batch_invariant(settings: Settings, facts: Facts, weights: WeightsConfig) -> None:
    """Raise SettingsError if results would depend on the batch or the layout with these settings."""
    model, parallel, machine = settings.model, settings.parallel, facts.machine
    alike = facts.checkpoint.tensor_parallel_sizes_alike
    refusal = None
    if parallel.tensor_parallel_size not in alike:
        refusal = (
            f"tensor_parallel_size={parallel.tensor_parallel_size}, whose sums have another order than those of one "
            f"rank; use one of {', '.join(map(str, alike))}"
        )
    elif not facts.on_gpu and weights.dtype == "float16":
        refusal = "dtype='float16' on a CPU; use 'bfloat16' or 'float32'"
    elif not facts.on_gpu and not machine.has_kernels:
        refusal = f"an installation without the C++ kernels; {INSTALL_COMPILER}"
    elif facts.on_gpu and not machine.has_triton:
        refusal = "an installation without triton (pip install 'moeserve[cuda]')"
    elif weights.quantization == "fp8":
        refusal = "quantization='fp8'; leave it out"
    elif model.attention_backend not in ("auto", "triton"):
        refusal = f"attention_backend={model.attention_backend!r}; use 'auto'"
    elif parallel.dispatcher == "deepep":
        refusal = "dispatcher='deepep', which adds the outputs of experts in its own order; use 'all_to_all' or 'auto'"
    if refusal is not None:
        raise SettingsError(f"batch_invariant=True does not allow {refusal}")


def _check_transformers(settings: Settings) -> None:
    """Raise SettingsError for settings that need moeserve's own model code."""
    model, parallel = settings.model, settings.parallel
    chosen = {
        "quantization": (model.quantization, None),
        "hf_overrides": (model.hf_overrides, None),
        "load_format": (model.load_format, "auto"),
        "batch_invariant": (model.batch_invariant, False),
        "rebalance": (parallel.rebalance, "off"),
        "pipeline_parallel_size": (parallel.pipeline_parallel_size, 1),
        "overlap_decode_tokens": (parallel.overlap_decode_tokens, None),
        "overlap_prefill_tokens": (parallel.overlap_prefill_tokens, None),
        "kv_transfer_address": (settings.cache.kv_transfer_address, None),
    }
    for name, (value, supported) in chosen.items():
        if value != supported:
            raise SettingsError(f"{name}={shown(value)} does not work with model_impl='transformers'; leave it out")
    if parallel.dispatcher == "deepep":
        raise SettingsError("dispatcher='deepep' does not work with model_impl='transformers'; use 'auto'")


def _check_speculation(speculation: SpeculativeConfig, checkpoint: CheckpointFacts) -> None:
    """Raise SettingsError if the model does not support the draft method."""
    if speculation.prompt_lookup_min > speculation.prompt_lookup_max:
        raise SettingsError(
            f"speculative_config: prompt_lookup_min={speculation.prompt_lookup_min} is more than "
            f"prompt_lookup_max={speculation.prompt_lookup_max}; lower prompt_lookup_min"
        )
    if speculation.method != "mtp":
        return
    if not checkpoint.has_draft_layer:
        raise SettingsError(
            "speculative_config: method='mtp' needs a multi-token prediction (MTP) layer, and "
            f"{checkpoint.path or 'the default model'} has no supported one; use method='ngram'"
        )
