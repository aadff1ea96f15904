"""Resolution of the checkpoint and of the number formats in which it is loaded."""

from __future__ import annotations

import logging
import re
from typing import Literal, cast, get_args

from moeserve.config.devices import DEVICES
from moeserve.config.engine_config import WeightsConfig
from moeserve.config.facts import INSTALL_COMPILER, Facts, from_settings
from moeserve.config.settings import DtypeName, QuantizationName, Settings, StoredFormatName
from moeserve.config.validation import parse_bytes
from moeserve.errors import SettingsError, shown

logger = logging.getLogger(__name__)

_DTYPE_OF_ALIAS = {"half": "float16", "float": "float32"}


def resolve_weights(settings: Settings, facts: Facts) -> WeightsConfig:
    """Return the checkpoint and the formats in which it is loaded.

    Raises:
        SettingsError: the checkpoint or the device does not support a format.
    """
    model = settings.model
    quantization = _own_quantization(model.quantization, facts)
    experts_on_host = model.expert_device == "cpu" and facts.on_gpu
    if experts_on_host:
        _check_host(settings, facts)
    elif model.num_cpu_layers is not None:
        raise SettingsError(
            f"num_cpu_layers={model.num_cpu_layers} is for device='cuda' with expert_device='cpu'; set both, or leave "
            "it out"
        )
    if model.model_impl == "transformers":
        _check_transformers(settings, quantization)
    dtype = cast(DtypeName, _DTYPE_OF_ALIAS.get(model.dtype, model.dtype))
    if model.dtype == "auto":
        dtype = _dtype_of_checkpoint(facts, quantization)
    keeps_mxfp4 = facts.checkpoint.has_mxfp4 and dtype == "bfloat16" and _has_mxfp4_kernels(facts)
    if quantization is None and keeps_mxfp4:
        quantization = "mxfp4"
    elif quantization is None and facts.checkpoint.has_blocks and _can_quantize(facts, dtype):
        quantization = "int4"
    if quantization == "mxfp4":
        _check_mxfp4(facts, dtype)
    elif quantization is not None:
        _check_quantization(quantization, facts, dtype, experts_on_host=experts_on_host)
    if model.rl:
        _check_updates(settings, facts)
    return from_settings(
        WeightsConfig,
        model,
        model_path=facts.checkpoint.path,
        hub_model=None,
        file_hashes=(),
        model_impl="moeserve" if model.model_impl == "auto" else model.model_impl,
        dtype=dtype,
        quantization=quantization,
        packed_cache=parse_bytes("packed_cache", model.packed_cache, least=0),
        experts_on_host=experts_on_host,
        expert_memory=_expert_memory(settings, facts),
        seed=model.seed or 0,
    )


def _expert_memory(settings: Settings, facts: Facts) -> int | float | Literal["auto"] | None:
    """Return the setting `expert_memory`: bytes of each rank, or a share of the bytes of all its experts; None: all.

    Raises:
        SettingsError: another setting excludes experts on disk.
    """
    model = settings.model
    if model.expert_memory is None:
        if model.expert_store is not None:
            raise SettingsError(
                f"expert_store={shown(model.expert_store)} has no effect without expert_memory: set that to the memory "
                "for experts, or to 'auto'"
            )
        return None
    what = f"expert_memory={shown(model.expert_memory)}"
    if facts.on_gpu and model.expert_device != "cpu":
        raise SettingsError(
            f"{what} is for experts on a CPU, and device='cuda'; add expert_device='cpu', or leave it out"
        )
    if not facts.checkpoint.num_sparse_layers:
        raise SettingsError(f"{what}, but {facts.checkpoint.path} has no experts; leave it out")
    if not facts.machine.has_kernels:
        raise SettingsError(f"{what} needs the C++ kernels: {INSTALL_COMPILER}")
    for name, value, needed in (
        ("load_format", model.load_format, "auto"),
        ("model_impl", model.model_impl, "auto"),
        ("rebalance", settings.parallel.rebalance, "off"),
        ("rl", model.rl, False),
    ):
        if value not in (needed, "moeserve"):
            raise SettingsError(f"{what} does not work with {name}={shown(value)}; leave one of them out")
    if model.expert_memory == "auto":
        return "auto"
    if isinstance(model.expert_memory, str) and (share := re.fullmatch(r"(\d+(?:\.\d+)?)%", model.expert_memory)):
        return float(share[1]) / 100
    return parse_bytes("expert_memory", model.expert_memory)


def _check_host(settings: Settings, facts: Facts) -> None:
    """Raise SettingsError if the host of the GPU cannot compute the experts."""
    model, what = settings.model, "expert_device='cpu'"
    if not facts.checkpoint.num_sparse_layers:
        raise SettingsError(f"{what}, but {facts.checkpoint.path} has no experts; leave it out")
    if not facts.machine.has_kernels:
        raise SettingsError(f"{what} needs the C++ kernels: {INSTALL_COMPILER}")
    if settings.parallel.num_ranks > 1:
        raise SettingsError(f"{what} is for one GPU, and there are {settings.parallel.num_ranks} ranks; use one")
    if model.model_impl == "transformers":
        raise SettingsError(f"{what} does not work with model_impl='transformers'; leave one of them out")
    if (model.num_cpu_layers or 0) > facts.checkpoint.num_layers:
        raise SettingsError(
            f"num_cpu_layers={model.num_cpu_layers}, but {facts.checkpoint.path} has {facts.checkpoint.num_layers} "
            "layers; choose at most that, or leave it out for all"
        )
    if (first := facts.checkpoint.first_sparse_layer) >= (model.num_cpu_layers or first + 1):
        raise SettingsError(
            f"num_cpu_layers={model.num_cpu_layers} leaves no experts to the host: the first layer with experts of "
            f"{facts.checkpoint.path} is number {first}, counted from 0; choose at least {first + 1}"
        )


def _own_quantization(name: str | None, facts: Facts) -> QuantizationName | None:
    """Return the quantisation that loading needs; None if the setting names a format that is read as it is stored.

    Raises:
        SettingsError: the setting names a format of checkpoints that is not this checkpoint's.
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
    """Return the dtype to compute in if the user chooses none: the checkpoint's dtype, unless that is slow."""
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


def _can_quantize(facts: Facts, dtype: DtypeName) -> bool:
    """Return True if there are kernels for int8 and int4."""
    return not facts.on_gpu and facts.machine.has_kernels and dtype != "float16"


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


def _check_quantization(
    name: QuantizationName, facts: Facts, dtype: DtypeName, *, experts_on_host: bool = False
) -> None:
    """Raise SettingsError if weights cannot be quantised while they are loaded."""
    what = f"quantization={name!r}"
    if experts_on_host:
        if name not in DEVICES["cpu"].quantizations or dtype == "float16":
            raise SettingsError(
                f"{what} with dtype={dtype!r} cannot be used for experts on the host (expert_device='cpu'); use 'int8' "
                "or 'int4' with dtype='bfloat16', or leave it out"
            )
        return
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


def _check_updates(settings: Settings, facts: Facts) -> None:
    """Raise SettingsError if a trainer cannot update the weights."""
    refusal = None
    if facts.on_gpu:
        refusal = "weights on a GPU; use device='cpu'"
    elif facts.checkpoint.quantization is not None:
        refusal = (
            f"weights that are stored as {facts.checkpoint.quantization!r}; use a checkpoint that is not quantised"
        )
    elif settings.model.expert_memory is not None:
        refusal = "expert_memory, because experts on disk cannot be written; leave it out"
    elif settings.model.model_impl == "transformers":
        refusal = "model_impl='transformers'; leave it out"
    elif settings.cache.kv_transfer_address is not None:
        refusal = "kv_transfer_address, because engines would exchange keys of different weights; leave it out"
    if refusal is not None:
        raise SettingsError(f"rl=True does not allow {refusal}")


def _check_transformers(settings: Settings, quantization: QuantizationName | None) -> None:
    """Raise SettingsError for settings that need moeserve's own model code."""
    model, parallel = settings.model, settings.parallel
    chosen = {
        "quantization": (quantization, None),
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
