"""Turn settings into an `EngineConfig`: every "auto" becomes a fact, and what cannot work is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moeserve.config.environment import is_inside_ray
from moeserve.config.settings import (
    DEFAULT_LOAD_WINDOW,
    DispatcherName,
    DtypeName,
    EngineConfig,
    ParallelSettings,
    QuantizationName,
    Settings,
    parse_bytes,
)
from moeserve.errors import SettingsError, shown

# More ranks than cores are slower than fewer; some are good for trying a layout out, more are a slip of the pen.
MAX_RANKS_PER_CORE = 4
LEAST_MOST_RANKS = 8
WITHOUT_NCCL = (  # of a torch
    "was built without NCCL, over which ranks on GPUs talk; install one for CUDA (https://pytorch.org/get-started), "
    "or use one rank, or device='cpu'"
)


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """What the engine must know of a checkpoint before it loads any of it."""

    path: str
    dtype: DtypeName
    vocab_size: int
    max_position_embeddings: int
    tensor_parallel_sizes: tuple[int, ...]  # over so many ranks its attention heads can be divided
    num_sparse_layers: int  # those with experts
    num_experts: int  # of each of these


def resolve(
    settings: Settings,
    checkpoint: CheckpointFacts,
    *,
    has_cuda: bool,
    num_cores: int,
    num_gpus: int | None = None,
    has_nccl: bool = True,
    has_kernels: bool = True,
    has_float8: bool = True,
    cores_of_nodes: Sequence[int] | None = None,
    expert_loads: tuple[tuple[float, ...], ...] = (),
    placements: tuple[str, ...] = (),
) -> EngineConfig:
    """Turns every "auto" and none into a fact.

    Args:
        checkpoint: facts read from the checkpoint's config.json.
        has_cuda: whether a CUDA device can be used.
        num_cores: CPU cores that this process may run on.
        num_gpus: CUDA devices that torch sees; none: nobody has counted.
        has_nccl: whether torch was built with NCCL.
        has_kernels: whether the C++ kernels were built.
        has_float8: whether the CUDA device multiplies 8-bit floats, and there are kernels that tell it to.
        cores_of_nodes: CPU cores of each node of the Ray cluster that is to be used; none: no Ray, see `wants_ray`.
        expert_loads: what the file says that the settings name: by layer with experts, by expert.
        placements: the same, for the file of placements: by layer with experts.

    Raises:
        SettingsError: the settings do not fit each other, the checkpoint or the machine.
    """
    model, cache, scheduler, parallel = settings.model, settings.cache, settings.scheduler, settings.parallel
    telemetry = settings.telemetry
    moves_experts = parallel.rebalance == "auto"
    is_load_wanted = moves_experts or telemetry.expert_load_file is not None or telemetry.metrics_port is not None
    num_ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if model.device == "cuda" and not has_cuda:
        raise SettingsError("device='cuda', but torch sees no CUDA device; use device='cpu' or device='auto'")
    device: Literal["cpu", "cuda"] = "cpu" if model.device == "auto" else model.device
    dtype: DtypeName = checkpoint.dtype if model.dtype == "auto" else model.dtype
    if model.quantization == "fp8":
        _refuse_float8(device, has_float8)
    elif model.quantization is not None:
        _refuse_integers(model.quantization, dtype, device, has_kernels)
    if model.attention_backend != "auto" and device != "cuda":
        raise SettingsError(
            f"attention_backend={model.attention_backend!r} is for GPUs, and device={device!r}; use 'auto'"
        )
    _refuse_layout(parallel, checkpoint.tensor_parallel_sizes, num_cores, cores_of_nodes)
    if device == "cuda":
        _refuse_gpus(parallel, num_gpus if cores_of_nodes is None else None, has_nccl)
    _refuse_redundancy(parallel.num_redundant_experts, checkpoint, num_ranks)
    if moves_experts and device == "cuda":
        raise SettingsError(
            "rebalance='auto' decides by how long ranks wait for each other, which this version counts on CPUs only; "
            "use rebalance='off', or a file of placements"
        )
    if moves_experts and num_ranks == 1:
        raise SettingsError("rebalance='auto' moves experts between ranks, and there is one; use rebalance='off'")
    if parallel.rebalance not in ("off", "auto") and parallel.expert_loads is not None:
        raise SettingsError(
            f"rebalance={shown(parallel.rebalance)} says where experts are, and so does "
            f"expert_loads={shown(parallel.expert_loads)}; leave one of them out"
        )
    if is_load_wanted and not checkpoint.num_sparse_layers:
        raise SettingsError(
            "the model has no experts, for rebalance to move or expert_load_file and metrics_port to tell of"
        )

    if model.max_model_len is not None and model.max_model_len > checkpoint.max_position_embeddings:
        raise SettingsError(
            f"max_model_len={model.max_model_len} is more than the checkpoint's max_position_embeddings "
            f"({checkpoint.max_position_embeddings}); choose at most that"
        )
    return EngineConfig(
        model_path=checkpoint.path,
        tokenizer_path=model.tokenizer or checkpoint.path,
        vocab_size=checkpoint.vocab_size,
        dtype=dtype,
        quantization=model.quantization,
        device=device,
        attention_backend="measured" if model.attention_backend == "auto" else model.attention_backend,
        load_format=model.load_format,
        packed_cache=parse_bytes("packed_cache", model.packed_cache, least=0),
        seed=model.seed,
        max_model_len=model.max_model_len or checkpoint.max_position_embeddings,
        max_model_len_may_shrink=model.max_model_len is None,
        block_size=cache.block_size,
        kv_cache_memory=None
        if cache.kv_cache_memory is None
        else parse_bytes("kv_cache_memory", cache.kv_cache_memory),
        enable_prefix_caching=cache.enable_prefix_caching,
        max_num_seqs=scheduler.max_num_seqs or (64 if device == "cpu" else 256),
        max_num_batched_tokens=scheduler.max_num_batched_tokens or (2048 if device == "cpu" else 8192),
        tensor_parallel_size=parallel.tensor_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        enforce_eager=scheduler.enforce_eager,
        num_threads=parallel.num_threads
        or _threads_per_rank(
            cores_of_nodes or (num_cores,), parallel.tensor_parallel_size, parallel.data_parallel_size
        ),
        executor=_choose_executor(parallel, num_ranks, cores_of_nodes),
        ray_compiled_graph=parallel.ray_compiled_graph,
        network_interface=parallel.network_interface,
        dispatcher=_choose_dispatcher(parallel.dispatcher, num_ranks, device),
        dispatcher_may_change=parallel.dispatcher == "auto",
        deepep_low_latency_tokens=parallel.deepep_low_latency_tokens,
        deepep_float8=parallel.deepep_float8,
        num_redundant_experts=parallel.num_redundant_experts,
        expert_loads=expert_loads,
        placements=placements,
        rebalance="auto" if parallel.rebalance == "auto" else "off",
        rebalance_horizon=parallel.rebalance_horizon,
        collective_timeout=parallel.collective_timeout,
        debug_collectives=parallel.debug_collectives,
        expert_load_window=telemetry.expert_load_window or (DEFAULT_LOAD_WINDOW if is_load_wanted else 0),
        expert_load_file=telemetry.expert_load_file,
        metrics_port=telemetry.metrics_port,
    )


def wants_ray(parallel: ParallelSettings, num_cores: int) -> bool:
    """Whether ranks are to be run by Ray: what `resolve` must be told the nodes for."""
    num_ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if parallel.executor == "auto" and num_ranks > 1:
        return is_inside_ray() or num_ranks > _most_ranks(num_cores)
    return parallel.executor == "ray"


def _most_ranks(num_cores: int) -> int:
    return max(LEAST_MOST_RANKS, MAX_RANKS_PER_CORE * num_cores)


def fit_whole(cores_of_nodes: Sequence[int], num_threads: int, tp: int, dp: int) -> bool:
    """Whether all replicas fit on nodes without one that is spread over several."""
    return sum(cores // (num_threads * tp) for cores in cores_of_nodes) >= dp


def _threads_per_rank(cores_of_nodes: Sequence[int], tp: int, dp: int) -> int:
    """The most that all ranks can have, with replicas whole if that is possible; one where cores are too few."""
    for size, count in ((tp, dp), (1, tp * dp)):
        for num_threads in range(max(cores_of_nodes), 0, -1):
            if fit_whole(cores_of_nodes, num_threads, size, count):
                return num_threads
    return 1


def _choose_executor(
    parallel: ParallelSettings, num_ranks: int, cores_of_nodes: Sequence[int] | None
) -> Literal["uniproc", "mp", "ray"]:
    if parallel.executor != "auto":
        return parallel.executor
    if cores_of_nodes is not None:
        return "ray"
    return "uniproc" if num_ranks == 1 else "mp"


def _choose_dispatcher(wanted: Literal["auto"] | DispatcherName, num_ranks: int, device: str) -> DispatcherName:
    if wanted == "auto":
        if num_ranks == 1:
            return "local"
        return "deepep" if device == "cuda" else "all_to_all"
    if wanted == "deepep" and (num_ranks == 1 or device != "cuda"):
        raise SettingsError(
            f"dispatcher='deepep' carries tokens between GPUs, but there is {num_ranks} rank on device {device!r}; use "
            "'auto'"
            if num_ranks == 1
            else f"dispatcher='deepep' carries tokens between GPUs, and device={device!r}; use 'all_to_all' or 'auto'"
        )
    if wanted == "local" and num_ranks > 1:
        raise SettingsError(
            f"dispatcher='local' carries no token to another rank, but there are {num_ranks}; "
            "use 'allgather', 'all_to_all' or 'auto'"
        )
    return wanted


def _refuse_layout(
    parallel: ParallelSettings,
    sizes: tuple[int, ...],
    num_cores: int,
    cores_of_nodes: Sequence[int] | None,
) -> None:
    """Raises SettingsError for a layout of ranks that this checkpoint, this machine or this version cannot run."""
    tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
    layout = shown_layout(tp, dp)
    if parallel.pipeline_parallel_size > 1:
        raise SettingsError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}: this version does not divide a model into "
            "stages; use 1, and tensor_parallel_size or data_parallel_size for more ranks"
        )
    if tp not in sizes:
        raise SettingsError(
            f"tensor_parallel_size={tp}: the checkpoint's attention heads cannot be divided over so many ranks; "
            f"use one of {', '.join(map(str, sizes))}"
        )
    if tp * dp > 1 and parallel.executor == "uniproc":
        raise SettingsError(f"executor='uniproc' runs one rank, but {layout} asks for {tp * dp}; use executor='mp'")
    if cores_of_nodes is not None:
        _refuse_crowding(layout, tp * dp, parallel.num_threads or 1, cores_of_nodes)
    elif tp * dp > _most_ranks(num_cores):
        raise SettingsError(
            f"{layout} asks for {tp * dp} ranks, but this process may use {num_cores} CPU cores; "
            f"use at most {_most_ranks(num_cores)} ranks (as many as cores for speed), or executor='ray' and more hosts"
        )


def shown_layout(tp: int, dp: int) -> str:
    """What errors call a layout of ranks."""
    return f"tensor_parallel_size={tp}, data_parallel_size={dp}"


def _refuse_gpus(parallel: ParallelSettings, num_gpus: int | None, has_nccl: bool) -> None:
    """Raises SettingsError for several ranks on GPUs that cannot talk, or that this host has too few for.

    Args:
        num_gpus: of this host; none: unknown, or Ray finds GPUs on other hosts too.
    """
    tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
    if tp * dp > 1 and not has_nccl:
        raise SettingsError(f"{shown_layout(tp, dp)}: torch {WITHOUT_NCCL}")
    if num_gpus is not None and tp * dp > num_gpus:
        raise SettingsError(too_few_gpus(tp, dp, num_gpus))


def too_few_gpus(tp: int, dp: int, num_gpus: int) -> str:
    """What is wrong with a layout for which a host has not enough of them, and what to do."""
    return (
        f"{shown_layout(tp, dp)} asks for {tp * dp} ranks, each with a GPU of its own, but torch sees {num_gpus} on "
        f"this host; use at most {num_gpus} rank{'s' * (num_gpus != 1)}, let torch see more (CUDA_VISIBLE_DEVICES), or "
        "use executor='ray' and more hosts"
    )


def _refuse_crowding(layout: str, num_ranks: int, num_threads: int, cores_of_nodes: Sequence[int]) -> None:
    """Raises SettingsError for more ranks than a Ray cluster has room for."""
    most = sum(cores // num_threads for cores in cores_of_nodes)
    if num_ranks > most:
        cores = ", ".join(map(str, cores_of_nodes))
        raise SettingsError(
            f"{layout} asks for {num_ranks} ranks with num_threads={num_threads}, but the nodes of the Ray cluster "
            f"have {cores} CPUs, room for {most}; use fewer ranks or threads, or more nodes"
        )


def _refuse_float8(device: str, has_float8: bool) -> None:
    """Raises SettingsError where no kernel multiplies 8-bit floats."""
    if device == "cpu":
        raise SettingsError(
            "quantization='fp8' is a format for GPUs, and device='cpu'; use quantization='int8' or 'int4' on CPUs, or "
            "device='cuda'"
        )
    if not has_float8:
        raise SettingsError(
            "quantization='fp8' needs triton and a GPU of compute capability 8.9 or more, such as H100; one of them is "
            "missing. Install triton (pip install 'moeserve[cuda]'), or leave quantization out"
        )


def _refuse_integers(quantization: QuantizationName, dtype: DtypeName, device: str, has_kernels: bool) -> None:
    """Raises SettingsError for a format that no kernel reads on this device, beside this dtype or in this install."""
    if device != "cpu":
        raise SettingsError(
            f"quantization={quantization!r} is a format for CPUs, and device={device!r}; use quantization='fp8' on "
            "GPUs, or device='cpu'"
        )
    if dtype == "float16":
        raise SettingsError(
            f"quantization={quantization!r} does not go with dtype='float16'; use dtype='bfloat16' or 'float32'"
        )
    if not has_kernels:
        raise SettingsError(
            f"quantization={quantization!r} needs the C++ kernels, and moeserve was installed without them. Install a "
            "C++17 compiler (g++ or clang++) and install moeserve again, or leave quantization out"
        )


def _refuse_redundancy(num_redundant: int, checkpoint: CheckpointFacts, num_ranks: int) -> None:
    """Raises SettingsError for more copies of experts than ranks could hold, of which each takes one."""
    most = checkpoint.num_experts * (num_ranks - 1)
    if num_redundant and num_ranks == 1:
        raise SettingsError(
            f"num_redundant_experts={num_redundant}: copies of experts are for several ranks, and there is one; "
            "use 0, or more ranks"
        )
    if num_redundant > most:
        raise SettingsError(
            f"num_redundant_experts={num_redundant}: {checkpoint.num_experts} experts on {num_ranks} ranks have room "
            f"for {most} further copies, since a second copy on the same rank is of no use; use at most {most}"
        )
