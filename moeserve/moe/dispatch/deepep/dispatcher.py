"""Dispatch by DeepEP, whose kernels carry rows over NVLink and RDMA: whether it can serve, and the dispatcher.

https://github.com/deepseek-ai/DeepEP; its package `deep_ep` is imported here and nowhere else. What it offers is told
by what its functions are called with, not by a version: forks count theirs differently.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from moeserve.config.environment import nvshmem_queue_depth, set_for_libraries
from moeserve.distributed.group import GroupCoordinator
from moeserve.errors import SettingsError
from moeserve.expert_placement.placement import Placement
from moeserve.moe.dispatch.base import Pending, PendingOutput
from moeserve.moe.dispatch.deepep.communicator import FLOAT8_BLOCK, DeepEPCommunicator, DeepEPShape
from moeserve.moe.dispatch.deepep.elastic import ElasticCommunicator
from moeserve.moe.dispatch.deepep.legacy import LegacyCommunicator
from moeserve.moe.dispatch.replicas import Replicas
from moeserve.moe.router import Routing
from moeserve.step_inputs import StepInputs

__all__ = ["DeepEPDispatcher", "DeepEPShape", "choose_deepep", "deepep_refusal", "open_deepep"]

logger = logging.getLogger(__name__)

# T tokens, D model width, K experts per token

Api = Literal["elastic", "legacy"]

MIN_CAPABILITY = (9, 0)  # Hopper: README.md, "Requirements"

# What a kernel under way reads and writes is kept by its event, which handles hold until the wait. By default torch's
# allocator is told instead, which then keeps all of it until the end of a capture: no layer of a graph could use the
# memory of another.
ENVIRONMENT = {"EP_AVOID_RECORD_STREAM": "1"}

OTHERS_REFUSE = "another rank cannot use it, and says why"

# What must be there for each: the class, its methods, and what they are called with.
NEEDED: dict[Api, tuple[str, dict[str, set[str]]]] = {
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

# Of the low-latency kernels of `Buffer`: SWITCH_HIDDEN in csrc/kernels/launch.cuh, kNumMaxTopK in
# csrc/kernels/internode_ll.cu, and low_latency_dispatch in deep_ep/buffer.py, which wants a queue twice as deep.
LOW_LATENCY_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
MAX_LOW_LATENCY_TOP_K = 11
QUEUE_DEPTH = "NVSHMEM_QP_DEPTH"
DEFAULT_QUEUE_DEPTH = 1024

# Of the normal kernels of `Buffer`: csrc/kernels/configs.cuh, and csrc/kernels/internode.cu for several hosts.
MAX_LEGACY_EXPERTS_PER_RANK = 1024
MAX_RANKS_OF_ONE_HOST = 8  # NUM_MAX_NVL_PEERS: how many ranks are taken for those of one host, in their order
SEVERAL_HOSTS_HIDDEN_MULTIPLE = 256

# Of `ElasticBuffer`: deep_ep/include/deep_ep/common/layout.cuh, and kNumTopk and kNumTMAAlignBytes in its kernels.
MAX_ELASTIC_RANKS = 1024
MAX_ELASTIC_EXPERTS = 2048
MAX_ELASTIC_EXPERTS_PER_RANK = 256
MAX_ELASTIC_TOP_K = 32

HIDDEN_MULTIPLE = 16  # 32 bytes of bfloat16


class DeepEPDispatcher:
    """Tokens travel by DeepEP's kernels. See `Dispatcher` for the contract.

    A step takes the way for few tokens if no rank brings more than `low_latency_tokens` to it. With the first interface
    tokens then arrive as `SlottedTokens`, in whose empty slots anything may be; in all other cases, as `PackedTokens`.
    Sums are rounded in more places than the contract says; see the two communicators.
    """

    def __init__(
        self, group: GroupCoordinator, placement: Placement, device: torch.device, *, communicator: DeepEPCommunicator
    ) -> None:
        """
        Args:
            placement: of this layer; as many slots on each rank.
            communicator: of all layers.
        """
        assert placement.num_slots == communicator.shape.num_slots, (placement.num_slots, communicator.shape.num_slots)
        self.group = group
        self.communicator = communicator
        self.replicas = Replicas(placement, group.rank_in_group, group.node_of_rank, device)

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> Pending[Any]:
        rank, shape = self.group.rank_in_group, self.communicator.shape
        assert len(hidden_TD) == step.tokens_per_rank[rank], (len(hidden_TD), step.tokens_per_rank)
        assert max(step.tokens_per_rank) <= max(shape.max_tokens_per_rank, shape.low_latency_tokens)
        assert hidden_TD.shape[1] == shape.hidden_size
        assert hidden_TD.dtype == shape.dtype
        assert routing.experts_TK.shape[1] == shape.top_k
        experts_TK = self.replicas.choose(routing.experts_TK, first_token=sum(step.tokens_per_rank[:rank]))
        return self.communicator.dispatch(
            hidden_TD.contiguous(),
            experts_TK.to(torch.int64).contiguous(),
            routing.weights_TK.float().contiguous(),
            step.tokens_per_rank,
        )

    def combine(self, output: Tensor, handle: Any) -> PendingOutput:
        return self.communicator.combine(output.contiguous(), handle)

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        return self.communicator.is_capturable(tokens_per_rank)


def choose_deepep(
    shape: DeepEPShape,
    group: GroupCoordinator,
    device: torch.device,
    *,
    is_asked_for: bool,
    deep_ep: ModuleType | None = None,
) -> ModuleType | None:
    """The package, if all ranks can use it and by the same interface; otherwise None, and the reason is logged.

    Collective: all ep ranks.

    Args:
        is_asked_for: by the user, by name: there is no falling back.
        deep_ep: the package, if it has been imported; None: it is imported now.

    Raises:
        SettingsError: it was asked for and cannot serve.
    """
    refusal = deepep_refusal(shape, device, group.node_of_rank, deep_ep)
    package = None if refusal else deep_ep or import_deepep()
    found = 0 if package is None else 1 + [*NEEDED].index(_known_api(package))
    least, most = group.all_reduce_minimum(found), -group.all_reduce_minimum(-found)
    if least == most and package is not None:
        return package
    _go_without(
        group,
        refusal or ("packages on other ranks offer another interface" if least else OTHERS_REFUSE),
        is_asked_for=is_asked_for,
    )
    return None


def open_deepep(
    deep_ep: ModuleType,
    shape: DeepEPShape,
    process_group: Any,
    group: GroupCoordinator,
    device: torch.device,
    *,
    is_asked_for: bool,
    is_deterministic: bool = True,
) -> DeepEPCommunicator | None:
    """The buffer for all layers, on all ranks or on none: once for a model, before anything is captured.

    Its constructor finds the connections between GPUs and hosts, and raises what it likes where one is missing. If
    that is so on some ranks alone, the others may wait for them within it, until a time-out of its own or of NCCL's.
    Collective: all ep ranks.

    Args:
        deep_ep: as `choose_deepep` returned it.
        process_group: of torch.distributed, with NCCL: the ranks of `group` in their order.
        is_asked_for: by the user, by name: there is no falling back.
        is_deterministic: see `ElasticCommunicator`, which alone knows this. Not among ranks of several hosts.

    Raises:
        SettingsError: it was asked for and cannot serve.
    """
    communicator: DeepEPCommunicator | None = None
    refusal, api = OTHERS_REFUSE, _known_api(deep_ep)
    try:
        match api:
            case "elastic":
                is_deterministic = is_deterministic and len(set(group.node_of_rank)) == 1
                communicator = ElasticCommunicator(
                    deep_ep, shape, process_group, device, is_deterministic=is_deterministic
                )
            case "legacy":
                communicator = LegacyCommunicator(deep_ep, shape, process_group, group.rank_in_group, device)
    except Exception as error:
        refusal = f"its buffer cannot be opened: {type(error).__name__}: {' '.join(str(error).split())}"
    if group.all_reduce_minimum(int(communicator is not None)):
        return communicator
    # One that was opened is left alone: to give it back takes all ranks.
    _go_without(group, refusal, is_asked_for=is_asked_for)
    return None


def _go_without(group: GroupCoordinator, refusal: str, *, is_asked_for: bool) -> None:
    """Says why DeepEP does not carry the tokens. SettingsError if it was asked for."""
    if is_asked_for:
        raise SettingsError(f"dispatcher='deepep' cannot be: {refusal}. Use 'all_to_all' or 'auto'")
    logger.info("rank %d: DeepEP does not carry the tokens: %s. all_to_all carries them", group.rank, refusal)


def deepep_refusal(
    shape: DeepEPShape, device: torch.device, node_of_rank: Sequence[int], deep_ep: ModuleType | None = None
) -> str | None:
    """Why DeepEP cannot carry tokens of this shape on this machine, as half a sentence; None: it can.

    Whether its constructor finds the NVLink and RDMA connections that it needs, `open_deepep` sees.

    Args:
        node_of_rank: by ep rank: a number of its host.
        deep_ep: the package; None: it is imported.
    """
    try:
        package = deep_ep or import_deepep()
    except ImportError as error:
        return str(error)
    return _refusal_of_machine(device) or refusal_of_shape(shape, node_of_rank, package)


def refusal_of_shape(shape: DeepEPShape, node_of_rank: Sequence[int], deep_ep: ModuleType) -> str | None:
    """`deepep_refusal`, whatever this rank's device."""
    api = offered_api(deep_ep)
    if api is None:
        return f"this deep_ep has {' and '.join(_lacking(deep_ep, each) for each in NEEDED)}"
    hidden_size, num_ranks, num_slots = shape.hidden_size, shape.num_ranks, max(shape.num_slots)
    ids = getattr(deep_ep, "topk_idx_t", torch.int64)
    if num_ranks < 2:
        return "there is only one rank"
    if ids != torch.int64:
        return f"this deep_ep was built for experts' numbers of type {ids}, not torch.int64"
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
        return _refusal_of_elastic(shape, num_slots)
    return _refusal_of_normal(shape, num_slots, node_of_rank, deep_ep) or _refusal_of_low_latency(shape)


def offered_api(deep_ep: ModuleType) -> Api | None:
    """The interface to use: the newer one, if both are there."""
    return next((api for api in NEEDED if not _lacking(deep_ep, api)), None)


def _known_api(deep_ep: ModuleType) -> Api:
    """`offered_api` of a package that is not refused."""
    api = offered_api(deep_ep)
    assert api is not None
    return api


def _lacking(deep_ep: ModuleType, api: Api) -> str:
    """What an interface lacks, in words; nothing, if it is all there."""
    class_name, functions = NEEDED[api]
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
    """The package.

    Raises:
        ImportError: why there is none, as half a sentence. Its own checks of libraries and drivers raise anything.
    """
    set_for_libraries(ENVIRONMENT)
    try:
        return importlib.import_module("deep_ep")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "deep_ep":
            raise ImportError(
                "the package deep_ep is not installed (pip install sgl-deep-ep, of which each release wants one torch)"
            ) from None
        raise ImportError(f"the package deep_ep cannot be imported: {type(error).__name__}: {error}") from error


def _refusal_of_machine(device: torch.device) -> str | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"it runs on CUDA devices, and this rank's is {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"its kernels need compute capability 9.0, and {device} has {capability[0]}.{capability[1]}"
    return None


def _refusal_of_elastic(shape: DeepEPShape, num_slots: int) -> str | None:
    if shape.num_ranks > MAX_ELASTIC_RANKS:
        return f"{shape.num_ranks} ranks are more than its {MAX_ELASTIC_RANKS}"
    if shape.num_physical > MAX_ELASTIC_EXPERTS:
        return f"{shape.num_physical} experts with their copies are more than its {MAX_ELASTIC_EXPERTS}"
    if num_slots > MAX_ELASTIC_EXPERTS_PER_RANK:
        return f"{num_slots} experts on a rank are more than its {MAX_ELASTIC_EXPERTS_PER_RANK}"
    if shape.top_k > MAX_ELASTIC_TOP_K:
        return f"{shape.top_k} experts for a token are more than its {MAX_ELASTIC_TOP_K}"
    return None


def _refusal_of_normal(
    shape: DeepEPShape, num_slots: int, node_of_rank: Sequence[int], deep_ep: ModuleType
) -> str | None:
    try:
        deep_ep.Buffer.get_dispatch_config(shape.num_ranks)
        deep_ep.Buffer.get_combine_config(shape.num_ranks)
    except AssertionError:  # its table of numbers of ranks is inside
        return f"it has no configuration for {shape.num_ranks} ranks"
    if num_slots > MAX_LEGACY_EXPERTS_PER_RANK:
        return f"{num_slots} experts on a rank are more than its {MAX_LEGACY_EXPERTS_PER_RANK}"
    for first in range(0, shape.num_ranks, MAX_RANKS_OF_ONE_HOST):
        if len(set(node_of_rank[first : first + MAX_RANKS_OF_ONE_HOST])) > 1:
            return (
                f"its normal kernels want every {MAX_RANKS_OF_ONE_HOST} ranks on one host, and those from {first} on "
                "are on several"
            )
    if shape.num_ranks > MAX_RANKS_OF_ONE_HOST and shape.hidden_size % SEVERAL_HOSTS_HIDDEN_MULTIPLE:
        return f"between hosts, hidden size {shape.hidden_size} is not a multiple of {SEVERAL_HOSTS_HIDDEN_MULTIPLE}"
    return None


def _refusal_of_low_latency(shape: DeepEPShape) -> str | None:
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
