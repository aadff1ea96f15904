"""Resolution of the device of each rank and of the kernels that it uses."""

from __future__ import annotations

from moeserve.config.engine_config import CacheConfig, DeviceConfig, ParallelConfig, WeightsConfig
from moeserve.config.facts import INSTALL_COMPILER, Facts, MachineFacts, from_settings
from moeserve.config.resolve_parallel import threads_per_rank
from moeserve.config.settings import AttentionChoice, ModelSettings, ParallelSettings, ProductChoice, Settings
from moeserve.errors import SettingsError


def resolve_compute(
    settings: Settings, facts: Facts, weights: WeightsConfig, cache: CacheConfig, layout: ParallelConfig
) -> DeviceConfig:
    """Return the device of each rank, and the kernels that it uses.

    Raises:
        SettingsError: the settings exclude batch invariance, or an attention backend does not support the KV cache.
    """
    model, parallel, machine = settings.model, settings.parallel, facts.machine
    if model.batch_invariant:
        _check_batch_invariant(settings, facts, weights)
    if cache.has_float8_cache and model.attention_backend not in ("auto", "triton"):
        raise SettingsError(
            f"attention_backend={model.attention_backend!r} cannot read the scales of "
            f"kv_cache_dtype={settings.cache.kv_cache_dtype!r}; use attention_backend='triton'"
        )
    # Libraries support neither scales per cached row nor a fixed order of additions. FlashInfer's wrappers are planned
    # for one step at a time, so overlapped steps cannot use it either.
    no_libraries = cache.has_float8_cache or model.batch_invariant or parallel.has_overlap
    may_use_libraries = facts.on_gpu and not no_libraries
    attention: AttentionChoice = "measured" if may_use_libraries else "triton"
    product: ProductChoice = "measured" if weights.quantization == "fp8" else "triton"
    return from_settings(
        DeviceConfig,
        model,
        device=facts.device.name,
        attention_backend=attention if model.attention_backend == "auto" else model.attention_backend,
        product_backend=product if model.product_backend == "auto" else model.product_backend,
        enforce_eager=settings.scheduler.enforce_eager or model.model_impl == "transformers",
        num_threads=parallel.num_threads or _default_threads(parallel, machine),
        numa_binding=parallel.numa_binding and layout.executor == "mp" and layout.nnodes == 1 and not facts.on_gpu,
    )


def _default_threads(parallel: ParallelSettings, machine: MachineFacts) -> int:
    if machine.cores_of_nodes is not None:
        return threads_per_rank(machine.cores_of_nodes, parallel)
    num_threads = threads_per_rank((machine.num_cores,), parallel)
    return num_threads if machine.max_threads is None else min(num_threads, machine.max_threads)


def check_device(model: ModelSettings, facts: Facts, weights: WeightsConfig) -> None:
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


def _check_batch_invariant(settings: Settings, facts: Facts, weights: WeightsConfig) -> None:
    """Raise SettingsError if results would depend on the batch or the layout with these settings."""
    model, parallel, machine = settings.model, settings.parallel, facts.machine
    needs, alike = facts.checkpoint.needs, facts.checkpoint.tensor_parallel_sizes_alike
    if facts.on_gpu and needs.without_gpu_order is not None:
        raise SettingsError(
            f"batch_invariant=True: on GPUs, {needs.without_gpu_order}, which this model has, have no kernels whose "
            "sums have one order; leave it out or use device='cpu'"
        )
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
