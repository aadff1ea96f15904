"""Checks whether DeepEP can carry the tokens of a model: the package, the GPU, the shapes.

https://github.com/deepseek-ai/DeepEP. Its package `deep_ep` is imported here and nowhere else. The signatures of its
functions decide what it offers, not its version: forks number their versions differently.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import torch

from moeserve.config.environment import nvshmem_queue_depth, set_for_libraries
from moeserve.moe.dispatch.deepep.communicator import FLOAT8_BLOCK, DeepEPShape

Api = Literal["elastic", "legacy"]

MIN_CAPABILITY = (9, 0)  # Hopper: "Requirements" in DeepEP's README

# The event of a running kernel keeps the tensors it reads and writes alive; handles hold the event until the wait.
# DeepEP's default records streams with torch's allocator instead, which keeps that memory until a capture ends, so the
# layers of a graph could not reuse each other's memory.
ENVIRONMENT = {"EP_AVOID_RECORD_STREAM": "1"}

# For each API: the class, its methods, and the arguments that we pass.
REQUIRED: dict[Api, tuple[str, dict[str, set[str]]]] = {
    "elastic": (
        "ElasticBuffer",
        {
            "__init__": {"group", "num_max_tokens_per_rank", "hidden", "num_topk", "use_fp8_dispatch"},
            "dispatch": {
                *("x", "topk_idx", "topk_weights", "num_experts", "num_max_tokens_per_rank", "expert_alignment"),
                *("async_with_compute_stream", "do_cpu_sync", "do_expand"),
            },
            "combine": {"x", "handle", "async_with_compute_stream"},
        },
    ),
    "legacy": (
        "Buffer",
        {
            "__init__": {"group", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank"},
            "get_dispatch_config": {"num_ranks"},
            "get_combine_config": {"num_ranks"},
            "get_low_latency_rdma_size_hint": {"num_max_dispatch_tokens_per_rank", "hidden", "num_ranks"},
            "get_dispatch_layout": {"topk_idx", "num_experts"},
            "dispatch": {
                *("x", "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank", "num_tokens_per_expert"),
                *("topk_idx", "topk_weights", "async_finish"),
            },
            "combine": {"x", "handle", "async_finish"},
            "low_latency_dispatch": {
                *("x", "topk_idx", "num_max_dispatch_tokens_per_rank", "num_experts", "use_fp8", "async_finish"),
            },
            "low_latency_combine": {"x", "topk_idx", "topk_weights", "handle", "async_finish"},
            "clean_low_latency_buffer": {"num_max_dispatch_tokens_per_rank", "hidden", "num_experts"},
        },
    ),
}

# Limits of the low-latency kernels of `Buffer`: SWITCH_HIDDEN in csrc/kernels/launch.cuh, kNumMaxTopK in
# csrc/kernels/internode_ll.cu, and low_latency_dispatch in deep_ep/buffer.py, which requires a queue twice as deep.
LOW_LATENCY_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
MAX_LOW_LATENCY_TOP_K = 11
QUEUE_DEPTH = "NVSHMEM_QP_DEPTH"
DEFAULT_QUEUE_DEPTH = 1024

# Limits of the normal kernels of `Buffer`: csrc/kernels/configs.cuh, and csrc/kernels/internode.cu for several hosts.
MAX_LEGACY_EXPERTS_PER_RANK = 1024
MAX_RANKS_OF_ONE_HOST = 8  # NUM_MAX_NVL_PEERS: consecutive ranks that DeepEP takes to share a host
SEVERAL_HOSTS_HIDDEN_MULTIPLE = 256

# Limits of `ElasticBuffer`: deep_ep/include/deep_ep/common/layout.cuh; kNumTopk and kNumTMAAlignBytes in its kernels.
MAX_ELASTIC_RANKS = 1024
MAX_ELASTIC_EXPERTS = 2048
MAX_ELASTIC_EXPERTS_PER_RANK = 256
MAX_ELASTIC_TOP_K = 32

HIDDEN_MULTIPLE = 16  # 32 bytes of bfloat16


def why_unsupported(
    shape: DeepEPShape, device: torch.device, node_of_rank: Sequence[int], deep_ep: ModuleType | None = None
) -> str | None:
    """Return why DeepEP cannot carry tokens of this shape on this machine, as half a sentence; None if it can.

    Missing NVLink or RDMA connections are found later, by `open_communicator`.

    Args:
        node_of_rank: by ep rank, the number of its host.
        deep_ep: the package; None: import it.
    """
    try:
        package = deep_ep or import_deepep()
    except ImportError as error:
        return str(error)
    return _why_machine_unsupported(device) or why_shape_unsupported(shape, node_of_rank, package)


def why_shape_unsupported(shape: DeepEPShape, node_of_rank: Sequence[int], deep_ep: ModuleType) -> str | None:
    """Return `why_unsupported` for any device."""
    api = offered_api(deep_ep)
    if api is None:
        return f"this deep_ep has {' and '.join(_lacking(deep_ep, each) for each in REQUIRED)}"
    hidden_size, num_ranks, num_slots = shape.hidden_size, shape.num_ranks, max(shape.num_slots)
    ids = getattr(deep_ep, "topk_idx_t", torch.int64)
    if num_ranks < 2:
        return "there is only one rank"
    if ids != torch.int64:
        return f"this deep_ep was built for expert ids of type {ids}, not torch.int64"
    if shape.dtype != torch.bfloat16:
        return f"it carries torch.bfloat16, and hidden states are {shape.dtype}"
    if len(set(shape.num_slots)) > 1:
        return (
            f"{shape.num_physical} experts with their copies cannot be divided by {num_ranks} ranks; choose "
            "num_redundant_experts so that all ranks have as many"
        )
    if hidden_size % HIDDEN_MULTIPLE:
        return f"hidden size {hidden_size} is not a multiple of {HIDDEN_MULTIPLE}"
    if shape.is_float8 and hidden_size % FLOAT8_BLOCK:
        return f"rows of {hidden_size} values cannot be cut into blocks of {FLOAT8_BLOCK} for float8"
    if api == "elastic":
        return _why_elastic_unsupported(shape, num_slots)
    return _why_normal_unsupported(shape, num_slots, node_of_rank, deep_ep) or _why_low_latency_unsupported(shape)


def offered_api(deep_ep: ModuleType) -> Api | None:
    """Return the API to use, the newer one if both are complete; None if neither is."""
    return next((api for api in REQUIRED if not _lacking(deep_ep, api)), None)


def _lacking(deep_ep: ModuleType, api: Api) -> str:
    """Return what an API lacks, in words; empty if it is complete."""
    class_name, functions = REQUIRED[api]
    found = getattr(deep_ep, class_name, None)
    if found is None:
        return f"no {class_name}"
    missing = [
        f"{class_name}.{function}({argument}=)"
        for function, arguments in functions.items()
        for argument in sorted(arguments - _arguments_of(found, function))
    ]
    return f"no {', '.join(missing)}" if missing else ""


def _arguments_of(owner: Any, function: str) -> set[str]:
    found = getattr(owner, function, None)
    return set() if found is None else set(inspect.signature(found).parameters)


def import_deepep() -> ModuleType:
    """Import and return the package.

    Raises:
        ImportError: it is missing or its own checks of libraries and drivers failed; the message is half a sentence.
    """
    set_for_libraries(ENVIRONMENT)
    try:
        return importlib.import_module("deep_ep")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "deep_ep":
            raise ImportError(
                "the package deep_ep is not installed (pip install sgl-deep-ep; each release requires one "
                "version of torch)"
            ) from None
        raise ImportError(f"the package deep_ep cannot be imported: {type(error).__name__}: {error}") from error


def _why_machine_unsupported(device: torch.device) -> str | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"it runs on CUDA devices, and this rank's is {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"its kernels need compute capability 9.0, and {device} has {capability[0]}.{capability[1]}"
    return None


def _why_elastic_unsupported(shape: DeepEPShape, num_slots: int) -> str | None:
    if shape.num_ranks > MAX_ELASTIC_RANKS:
        return f"{shape.num_ranks} ranks are more than its {MAX_ELASTIC_RANKS}"
    if shape.num_physical > MAX_ELASTIC_EXPERTS:
        return f"{shape.num_physical} experts with their copies are more than its {MAX_ELASTIC_EXPERTS}"
    if num_slots > MAX_ELASTIC_EXPERTS_PER_RANK:
        return f"{num_slots} experts on a rank are more than its {MAX_ELASTIC_EXPERTS_PER_RANK}"
    if shape.top_k > MAX_ELASTIC_TOP_K:
        return f"{shape.top_k} experts for a token are more than its {MAX_ELASTIC_TOP_K}"
    return None


def _why_normal_unsupported(
    shape: DeepEPShape, num_slots: int, node_of_rank: Sequence[int], deep_ep: ModuleType
) -> str | None:
    try:
        deep_ep.Buffer.get_dispatch_config(shape.num_ranks)
        deep_ep.Buffer.get_combine_config(shape.num_ranks)
    except AssertionError:  # the function holds the table of supported rank counts
        return f"it has no configuration for {shape.num_ranks} ranks"
    if num_slots > MAX_LEGACY_EXPERTS_PER_RANK:
        return f"{num_slots} experts on a rank are more than its {MAX_LEGACY_EXPERTS_PER_RANK}"
    for first in range(0, shape.num_ranks, MAX_RANKS_OF_ONE_HOST):
        if len(set(node_of_rank[first : first + MAX_RANKS_OF_ONE_HOST])) > 1:
            return (
                f"its normal kernels require every {MAX_RANKS_OF_ONE_HOST} ranks on one host, and those from "
                f"{first} on are on several"
            )
    if shape.num_ranks > MAX_RANKS_OF_ONE_HOST and shape.hidden_size % SEVERAL_HOSTS_HIDDEN_MULTIPLE:
        return f"between hosts, hidden size {shape.hidden_size} is not a multiple of {SEVERAL_HOSTS_HIDDEN_MULTIPLE}"
    return None


def _why_low_latency_unsupported(shape: DeepEPShape) -> str | None:
    if shape.low_latency_tokens == 0:
        return None
    if shape.hidden_size not in LOW_LATENCY_HIDDEN_SIZES:
        known = ", ".join(map(str, LOW_LATENCY_HIDDEN_SIZES))
        return f"its low-latency kernels are for hidden sizes {known}, not {shape.hidden_size}"
    if shape.top_k > MAX_LOW_LATENCY_TOP_K:
        return f"its low-latency kernels send a token to {MAX_LOW_LATENCY_TOP_K} experts at most, not {shape.top_k}"
    depth = nvshmem_queue_depth(DEFAULT_QUEUE_DEPTH)
    if 2 * (shape.low_latency_tokens + 1) > depth:
        return (
            f"its low-latency kernels carry {depth // 2 - 1} tokens of each rank at most, not "
            f"{shape.low_latency_tokens}, unless {QUEUE_DEPTH} is above {depth}"
        )
    return None
