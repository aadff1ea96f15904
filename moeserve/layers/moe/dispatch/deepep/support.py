"""Checks whether DeepEP can carry the tokens of a model: the package, the GPU, the shapes.

https://github.com/deepseek-ai/DeepEP. DeepEP's package `deep_ep` is imported here and nowhere else. The classes of the
package determine which API is used, not its version, because forks number their versions differently.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

import torch

from moeserve.config.environment import nvshmem_queue_depth, set_for_libraries
from moeserve.config.settings import DeepEPApi
from moeserve.layers.moe.dispatch.deepep.communicator import DeepEPShape
from moeserve.ops.rows.interface import FLOAT8_BLOCK

MIN_CAPABILITY = (9, 0)  # Hopper: "Requirements" in DeepEP's README

# The event of a running kernel keeps the tensors it reads and writes alive; handles hold the event until the wait.
# DeepEP's default records streams with torch's allocator instead, which keeps that memory until a capture ends, so the
# layers of a graph could not reuse each other's memory.
ENVIRONMENT = {"EP_AVOID_RECORD_STREAM": "1"}

# The class of each API, the newest first.
CLASSES: dict[DeepEPApi, str] = {"elastic": "ElasticBuffer", "legacy": "Buffer"}

# Limits of the low-latency kernels of `Buffer`: SWITCH_HIDDEN in csrc/kernels/launch.cuh, kNumMaxTopK in
# csrc/kernels/internode_ll.cu, and low_latency_dispatch in deep_ep/buffer.py, which requires a queue twice as deep.
LOW_LATENCY_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
MAX_LOW_LATENCY_TOP_K = 11
QUEUE_DEPTH = "NVSHMEM_QP_DEPTH"
DEFAULT_QUEUE_DEPTH = 1024

# Limits of the normal kernels of `Buffer` among several hosts: csrc/kernels/configs.cuh and csrc/kernels/internode.cu.
MAX_RANKS_OF_ONE_HOST = 8  # NUM_MAX_NVL_PEERS: consecutive ranks that DeepEP takes to share a host
SEVERAL_HOSTS_HIDDEN_MULTIPLE = 256

HIDDEN_MULTIPLE = 16  # 32 bytes of bfloat16


def why_unsupported(
    shape: DeepEPShape, device: torch.device, node_of_rank: Sequence[int], deep_ep: ModuleType | None = None
) -> str | None:
    """Return the reason why DeepEP cannot carry tokens of `shape` on this machine, as a clause; None if it can.

    Missing NVLink or RDMA connections are found later, by `open_communicator`.

    Args:
        node_of_rank: the number of the host of each ep rank.
        deep_ep: the package; None: import it.
    """
    try:
        package = deep_ep or import_deepep()
    except ImportError as error:
        return str(error)
    return _why_machine_unsupported(device) or why_shape_unsupported(shape, node_of_rank, package)


def why_shape_unsupported(shape: DeepEPShape, node_of_rank: Sequence[int], deep_ep: ModuleType) -> str | None:
    """Return the result of `why_unsupported` without the checks of the device."""
    api = offered_api(deep_ep, shape.api)
    names = CLASSES.values() if shape.api is None else [CLASSES[shape.api]]
    hidden_size, num_ranks = shape.hidden_size, shape.num_ranks
    limits = [
        (api is None, f"this deep_ep has no {' and no '.join(names)}"),
        (num_ranks < 2, "there is only one rank"),
        (shape.dtype != torch.bfloat16, f"it carries torch.bfloat16, and hidden states are {shape.dtype}"),
        (
            len(set(shape.num_slots)) > 1,
            f"{shape.num_physical} experts with their copies cannot be divided by {num_ranks} ranks; choose "
            "num_redundant_experts so that all ranks have as many",
        ),
        (hidden_size % HIDDEN_MULTIPLE > 0, f"hidden size {hidden_size} is not a multiple of {HIDDEN_MULTIPLE}"),
        (
            shape.is_float8 and hidden_size % FLOAT8_BLOCK > 0,
            f"rows of {hidden_size} values cannot be cut into blocks of {FLOAT8_BLOCK} for float8",
        ),
    ]
    if api == "legacy":
        limits += _limits_of_normal_kernels(shape, node_of_rank, deep_ep)
        limits += _limits_of_low_latency_kernels(shape) if shape.low_latency_tokens else []
    return next((reason for is_exceeded, reason in limits if is_exceeded), None)


def offered_api(deep_ep: ModuleType, wanted: DeepEPApi | None = None) -> DeepEPApi | None:
    """Return the API to use: `wanted`, or the newest if that is None. None if the package does not have the API."""
    offered = (api for api, class_name in CLASSES.items() if hasattr(deep_ep, class_name))
    return next((api for api in offered if wanted in (None, api)), None)


def import_deepep() -> ModuleType:
    """Import and return the package.

    Raises:
        ImportError: the package is missing, or its own checks of libraries and drivers failed. The message is a clause.
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


def _limits_of_normal_kernels(
    shape: DeepEPShape, node_of_rank: Sequence[int], deep_ep: ModuleType
) -> list[tuple[bool, str]]:
    num_ranks, hidden_size = shape.num_ranks, shape.hidden_size
    has_config = True
    try:
        deep_ep.Buffer.get_dispatch_config(num_ranks)
    except AssertionError:  # the function holds the table of supported rank counts
        has_config = False
    hosts = [node_of_rank[at : at + MAX_RANKS_OF_ONE_HOST] for at in range(0, num_ranks, MAX_RANKS_OF_ONE_HOST)]
    return [
        (not has_config, f"it has no configuration for {num_ranks} ranks"),
        (
            any(len(set(nodes)) > 1 for nodes in hosts),
            f"its normal kernels require every {MAX_RANKS_OF_ONE_HOST} consecutive ranks on one host",
        ),
        (
            len(hosts) > 1 and hidden_size % SEVERAL_HOSTS_HIDDEN_MULTIPLE > 0,
            f"between hosts, hidden size {hidden_size} is not a multiple of {SEVERAL_HOSTS_HIDDEN_MULTIPLE}",
        ),
    ]


def _limits_of_low_latency_kernels(shape: DeepEPShape) -> list[tuple[bool, str]]:
    hidden_sizes, top_k, num_tokens = LOW_LATENCY_HIDDEN_SIZES, shape.top_k, shape.low_latency_tokens
    depth = nvshmem_queue_depth(DEFAULT_QUEUE_DEPTH)
    return [
        (
            shape.hidden_size not in hidden_sizes,
            f"its low-latency kernels are for hidden sizes {', '.join(map(str, hidden_sizes))}, not "
            f"{shape.hidden_size}",
        ),
        (
            top_k > MAX_LOW_LATENCY_TOP_K,
            f"its low-latency kernels send a token to {MAX_LOW_LATENCY_TOP_K} experts at most, not {top_k}",
        ),
        (
            2 * (num_tokens + 1) > depth,
            f"its low-latency kernels carry {depth // 2 - 1} tokens of each rank at most, not {num_tokens}, unless "
            f"{QUEUE_DEPTH} is above {depth}",
        ),
    ]
