"""The installed libraries that are checked and timed for comparison with our kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.bench.gpu.inputs import Source
from moeserve.errors import SettingsError
from moeserve.ops.interfaces import OpenWeights, Product
from moeserve.ops.libraries.attention import LIBRARY_NAMES, open_library
from moeserve.ops.libraries.deep_gemm import why_unavailable, with_deep_gemm
from moeserve.ops.libraries.interface import AttentionLibrary, LibraryUnusable
from moeserve.ops.triton.table import TRITON_KERNELS


@functools.cache
def installed_libraries(device: torch.device) -> tuple[AttentionLibrary, ...]:
    """Return the libraries that can be used on a GPU, and print the reasons for the others."""
    found = []
    for name in LIBRARY_NAMES if device.type == "cuda" else ():
        try:
            found.append(open_library(name, device))
        except LibraryUnusable as error:
            print(f"{name} is left out: {error}", flush=True)
    return tuple(found)


def deep_gemm_products(source: Source, *weights: OpenWeights) -> dict[str, list[Product]]:
    """Return DeepGEMM's products by its name; an empty dict if it cannot be used."""
    if source.device.type != "cuda" or any(map(why_unavailable, weights)):
        return {}
    try:
        table = with_deep_gemm(TRITON_KERNELS, source.device, source.dtype)
    except SettingsError as error:
        print(f"deep_gemm is left out: {error}", flush=True)
        return {}
    return {"deep_gemm": [table.make_product(each) for each in weights]}


@functools.cache
def sglang_experts(device: torch.device) -> Callable[..., Tensor] | None:
    """Return SGLang's Triton experts, also from a wheel on Python's path; or None, and print why they cannot be used.

    Their arguments are rows [T, D], weights [E, 2 C, D] and [E, D, C], and weights and experts of tokens [T, K]. They
    compute SwiGLU.
    """
    if device.type != "cuda":
        return None
    try:
        module = importlib.import_module("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe")
        experts: Callable[..., Tensor] = module.fused_experts_impl
    except Exception as error:  # importing part of a package can raise anything
        print(f"sglang is left out: {type(error).__name__}: {error}", flush=True)
        return None
    return experts
