"""Resolution of settings to an `EngineConfig`: every "auto" is resolved, and contradictory settings are refused."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from moeserve.config.environment import is_inside_ray
from moeserve.config.expert_layout import ExpertShape, Numbers, resolve_expert_parallel
from moeserve.config.needs import Needs
from moeserve.config.settings import (
    DEFAULT_LOAD_WINDOW,
    AttentionChoice,
    CacheDtypeName,
    CacheSettings,
    DispatcherName,
    DtypeName,
    EngineConfig,
    ModelSettings,
    ParallelSettings,
    ProductChoice,
    QuantizationName,
    Settings,
    SpeculativeConfig,
    StoredFormatName,
)
from moeserve.config.validation import parse_bytes, parse_length
from moeserve.errors import SettingsError, shown

logger = logging.getLogger(__name__)

GPU_MEMORY_UTILIZATION = 0.9  # by default
# Upper bounds of the number of ranks on a host. A few more ranks than cores are useful to try a layout; many are a
# mistake.
MAX_RANKS_PER_CORE = 4
LEAST_MOST_RANKS = 8
WITHOUT_NCCL = (  # text that follows the name of a torch installation in messages
    "was built without NCCL, which ranks on GPUs need; install one for CUDA (https://pytorch.org/get-started), "
    "or use one rank, or device='cpu'"
)
INSTALL_COMPILER = (  # what to do without the C++ kernels, as messages end
    "install a C++17 compiler, such as g++ (on Debian and Ubuntu: apt install g++; on ARM also clang++), and then "
    "moeserve again"
)
_DTYPE_OF_ALIAS = {"half": "float16", "float": "float32"}


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """Properties of a checkpoint that are known before it is loaded."""

    path: str
    dtype: DtypeName
    vocab_size: int
    max_position_embeddings: int
    tensor_parallel_sizes: tuple[int, ...]  # sizes that divide its attention heads
    tensor_parallel_sizes_alike: tuple[int, ...] = (1,)  # the sizes among them with the same bytes as a single rank
    num_layers: int
    num_sparse_layers: int  # layers with experts
    num_experts: int  # number of experts in each of these layers
    expert_shape: ExpertShape | None = None  # experts of each of these layers; None: experts are never sliced
    quantization: str | None = None  # the format of the weights, as config.json names it; None: not quantised
    has_mxfp4: bool = False  # experts are stored in MXFP4
    needs: Needs = Needs()
    has_draft_layer: bool = False  # the last layer is the multi-token prediction (MTP) layer
    first_layers: frozenset[int] | None = None  # layers that may start a pipeline stage; None: all


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Properties of this host and its installation, or of the Ray cluster that runs the ranks."""

    num_cores: int  # cores that this process may use
    has_cuda: bool = False
    num_gpus: int | None = None  # GPUs that torch sees; None: not counted
    has_nccl: bool = True  # torch was built with NCCL
    has_kernels: bool = True  # the C++ kernels were built
    has_triton: bool = True
    has_bfloat16: bool = True  # the GPU can multiply bfloat16
    has_float8: bool = True  # the GPU and the installation can multiply 8-bit floats
    cores_of_nodes: Sequence[int] | None = None  # cores of each node of the Ray cluster; None: ranks run on this host


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
    model, cache, scheduler, parallel = settings.model, settings.cache, settings.scheduler, settings.parallel
    telemetry = settings.telemetry
    device: Literal["cpu", "cuda"] = "cpu" if model.device == "auto" else model.device
    quantization = _own_quantization(model.quantization, device, checkpoint, machine)
    model = dataclasses.replace(model, quantization=quantization)
    settings = dataclasses.replace(settings, model=model)
    dtype = cast(DtypeName, _DTYPE_OF_ALIAS.get(model.dtype, model.dtype))
    if model.dtype == "auto":
        dtype = _dtype_of_checkpoint(checkpoint, device, model.quantization, machine)
    needs_load = (
        parallel.rebalance == "auto" or telemetry.expert_load_file is not None or telemetry.metrics_port is not None
    )
    if quantization is None and checkpoint.has_mxfp4 and dtype == "bfloat16" and _has_mxfp4_kernels(device, machine):
        quantization = "mxfp4"
    _check_device(model, device, dtype, machine)
    if device == "cpu" and cache.gpu_memory_utilization is not None:
        logger.warning(
            "%s=%r has %s",
            "gpu_memory_utilization",
            cache.gpu_memory_utilization,
            "no effect on CPUs: a profiling run sizes the KV cache, or kv_cache_memory",
        )
    needs = checkpoint.needs
    if device == "cuda" and needs.without_gpu_kernels is not None:
        raise SettingsError(
            f"device='cuda': {needs.without_gpu_kernels}, which this model has, has no kernels for GPUs yet; use "
            "device='cpu'"
        )
    _check_needs(settings, needs, device)
    if quantization == "mxfp4":
        _check_mxfp4(device, dtype, checkpoint, machine)
    _check_layout(parallel, checkpoint.tensor_parallel_sizes, machine, device)
    if model.batch_invariant:
        _check_batch_invariant(settings, device, dtype, checkpoint, machine)
    pipeline_layers = layers_of_stages(
        checkpoint.num_layers, parallel.pipeline_parallel_size, parallel.pipeline_layers, checkpoint.first_layers
    )
    _check_expert_placement(parallel, checkpoint)
    _check_overlap(model, parallel, checkpoint, device)
    if model.model_impl == "transformers":
        _check_transformers(settings)
    if needs_load and not checkpoint.num_sparse_layers:
        raise SettingsError(
            "rebalance, expert_load_file and metrics_port need a model with experts, and this one has none"
        )
    longest = parse_length("max_model_len", model.max_model_len)
    if longest is not None and longest > checkpoint.max_position_embeddings:
        raise SettingsError(
            f"max_model_len={longest} is more than the model's longest context "
            f"({checkpoint.max_position_embeddings} tokens); choose at most that"
        )
    max_num_seqs = scheduler.max_num_seqs or (64 if device == "cpu" else 256)
    max_num_batched_tokens = scheduler.max_num_batched_tokens or (2048 if device == "cpu" else 8192)
    keeps_bytes = model.batch_invariant or (device == "cpu" and dtype != "float16" and machine.has_kernels)
    expert_parallel = resolve_expert_parallel(
        parallel,
        checkpoint.expert_shape,
        Numbers(device=device, dtype=dtype, quantization=quantization, keeps_bytes=keeps_bytes),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    dispatcher: DispatcherName = "allgather"
    if expert_parallel:
        dispatcher = _choose_dispatcher(parallel, device, prefers_deepep=not model.batch_invariant)
    _check_deepep(parallel, dispatcher)
    executor = _choose_executor(parallel, machine.cores_of_nodes)
    _check_kv_store(cache)
    has_float8_cache = is_float8_cache(cache.kv_cache_dtype, needs)
    if has_float8_cache and model.attention_backend not in ("auto", "triton"):
        raise SettingsError(
            f"attention_backend={model.attention_backend!r} cannot read the scales of "
            f"kv_cache_dtype={cache.kv_cache_dtype!r}; use attention_backend='triton'"
        )
    # Libraries support neither scales per cached row nor a fixed order of additions. FlashInfer's wrappers are planned
    # for one step at a time, so steps in halves cannot use it either.
    overlaps = (parallel.overlap_decode_tokens, parallel.overlap_prefill_tokens) != (None, None)
    may_use_libraries = device == "cuda" and not (has_float8_cache or model.batch_invariant or overlaps)
    attention_backend: AttentionChoice = "measured" if may_use_libraries else "triton"
    if model.attention_backend != "auto":
        attention_backend = model.attention_backend
    product_backend: ProductChoice = "measured" if quantization == "fp8" else "triton"
    if model.product_backend != "auto":
        product_backend = model.product_backend
    # Planning ahead needs ranks that know the tokens they sample. With pipeline stages, the last stage samples the
    # tokens that the first stage needs. With draft tokens, even the number of new tokens is unknown.
    speculation = scheduler.speculative_config
    plans_ahead = scheduler.async_scheduling and len(pipeline_layers) == 1 and speculation is None
    if speculation is not None:
        _check_speculation(speculation, checkpoint)
    return EngineConfig(
        model_path=checkpoint.path,
        tokenizer_path=model.tokenizer or checkpoint.path,
        hub_model=None,
        hub_tokenizer=None,
        vocab_size=checkpoint.vocab_size,
        dtype=dtype,
        quantization=quantization,
        device=device,
        attention_backend=attention_backend,
        product_backend=product_backend,
        batch_invariant=model.batch_invariant,
        load_format=model.load_format,
        ignore_unused_weights=model.ignore_unused_weights,
        hf_overrides=model.hf_overrides,
        model_impl="moeserve" if model.model_impl == "auto" else model.model_impl,
        packed_cache=parse_bytes("packed_cache", model.packed_cache, least=0),
        seed=model.seed or 0,
        max_model_len=longest or checkpoint.max_position_embeddings,
        max_model_len_may_shrink=longest is None,
        has_generation_config=model.generation_config == "auto",
        override_generation_config=tuple((model.override_generation_config or {}).items()),
        block_size=cache.block_size or needs.block_size,
        has_float8_cache=has_float8_cache,
        kv_cache_memory=None
        if cache.kv_cache_memory is None
        else parse_bytes("kv_cache_memory", cache.kv_cache_memory),
        gpu_memory_utilization=cache.gpu_memory_utilization or GPU_MEMORY_UTILIZATION,
        num_cache_blocks=None,
        enable_prefix_caching=cache.enable_prefix_caching,
        redoes_drafts=needs.redoes_drafts,
        num_saved_states=_num_saved_states(cache, checkpoint, max_num_seqs),
        kv_host_memory=parse_bytes("kv_host_memory", cache.kv_host_memory, least=0),
        kv_file=cache.kv_file,
        kv_folder=cache.kv_folder,
        kv_folder_size=parse_bytes("kv_folder_size", cache.kv_folder_size),
        kv_transfer_address=cache.kv_transfer_address,
        kv_transfer_key_file=cache.kv_transfer_key_file,
        kv_transfer_backend=cache.kv_transfer_backend,
        kv_transfer_timeout=cache.kv_transfer_timeout,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_tokens=scheduler.max_prefill_tokens,
        async_scheduling=plans_ahead,
        speculative_config=speculation,
        max_concurrent_batches=scheduler.max_concurrent_batches or (2 if plans_ahead else len(pipeline_layers)),
        tensor_parallel_size=parallel.tensor_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        pipeline_layers=pipeline_layers,
        max_queued_requests=scheduler.max_queued_requests,
        enforce_eager=scheduler.enforce_eager or model.model_impl == "transformers",
        num_threads=parallel.num_threads or _threads_per_rank(machine.cores_of_nodes or (machine.num_cores,), parallel),
        numa_binding=parallel.numa_binding and executor == "mp" and device == "cpu",
        executor=executor,
        ray_compiled_graph=parallel.ray_compiled_graph,
        network_interface=parallel.network_interface,
        expert_parallel=expert_parallel,
        dispatcher=dispatcher,
        dispatcher_may_change=parallel.dispatcher == "auto",
        deepep_low_latency_tokens=parallel.deepep_low_latency_tokens,
        deepep_api=None if parallel.deepep_api == "auto" else parallel.deepep_api,
        deepep_float8=parallel.deepep_float8,
        overlap_decode_tokens=parallel.overlap_decode_tokens,
        overlap_prefill_tokens=parallel.overlap_prefill_tokens,
        num_redundant_experts=parallel.num_redundant_experts,
        expert_loads=expert_loads,
        placements=placements,
        rebalance="auto" if parallel.rebalance == "auto" else "off",
        rebalance_horizon=parallel.rebalance_horizon,
        collective_timeout=parallel.collective_timeout,
        load_timeout=parallel.load_timeout,
        step_timeout=parallel.step_timeout,
        on_failure=_on_failure(parallel, executor),
        debug_collectives=parallel.debug_collectives,
        debug_rank_state=settings.scheduler.debug_rank_state,
        expert_load_window=telemetry.expert_load_window or (DEFAULT_LOAD_WINDOW if needs_load else 0),
        expert_load_file=telemetry.expert_load_file,
        metrics_port=telemetry.metrics_port,
    )


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


def wants_ray(parallel: ParallelSettings, num_cores: int) -> bool:
    """Return True if Ray should run the ranks. `MachineFacts.cores_of_nodes` must then be set."""
    if parallel.executor == "auto" and parallel.num_ranks > 1:
        return is_inside_ray() or parallel.num_ranks > _most_ranks(num_cores)
    return parallel.executor == "ray"


def layers_of_stages(
    num_layers: int,
    num_stages: int,
    given: Sequence[int] | None = None,
    first_layers: frozenset[int] | None = None,
) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage: the given ones, or an even division.

    If the layers do not divide evenly, the first stages have one layer more.

    Args:
        first_layers: layers that may start a stage; None: all.

    Raises:
        SettingsError: there are more stages than layers, `given` has a wrong number of stages or layers, or a stage
            would start with a layer that is not in `first_layers`.
    """
    sizes = _sizes_of_stages(num_layers, num_stages, given)
    starts = set(itertools.accumulate(sizes[:-1]))
    if first_layers is not None and (wrong := sorted(starts - first_layers)):
        raise SettingsError(
            f"pipeline_layers={shown(list(sizes))}: a stage would start with layer {wrong[0]}, which attends to the "
            "positions that the previous layer's indexer selected; stages may start with the layers "
            f"{', '.join(map(str, sorted(first_layers)))}, counted from 0"
        )
    return sizes


def _sizes_of_stages(num_layers: int, num_stages: int, given: Sequence[int] | None) -> tuple[int, ...]:
    if num_stages > num_layers:
        raise SettingsError(
            f"pipeline_parallel_size={num_stages}: the checkpoint has {num_layers} layers, and each stage needs one; "
            f"use at most {num_layers} stages"
        )
    if given is None:
        return tuple(num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages))
    if len(given) != num_stages:
        raise SettingsError(
            f"pipeline_layers={shown(list(given))} has {len(given)} stages, but pipeline_parallel_size={num_stages}; "
            "give one number of layers for each stage"
        )
    if sum(given) != num_layers:
        raise SettingsError(
            f"pipeline_layers={shown(list(given))} has {sum(given)} layers in all, but the checkpoint has {num_layers}"
        )
    return tuple(given)


def fit_whole(cores_of_nodes: Sequence[int], num_threads: int, size: int, count: int) -> bool:
    """Return True if `count` groups of `size` ranks fit on the nodes without dividing a group over several nodes."""
    return sum(cores // (num_threads * size) for cores in cores_of_nodes) >= count


def shown_layout(layout: ParallelSettings | EngineConfig) -> str:
    """Return the description of a layout of ranks for error messages."""
    tp, dp, pp = layout.tensor_parallel_size, layout.data_parallel_size, layout.pipeline_parallel_size
    stages = f", pipeline_parallel_size={pp}" if pp > 1 else ""
    return f"tensor_parallel_size={tp}, data_parallel_size={dp}{stages}"


def too_few_gpus(layout: ParallelSettings | EngineConfig, num_gpus: int) -> str:
    """Return the error message for a layout that needs more GPUs than this host has."""
    return (
        f"{shown_layout(layout)} needs {layout.num_ranks} ranks, each with its own GPU, but torch sees {num_gpus} on "
        f"this host; use at most {num_gpus} rank{'s' * (num_gpus != 1)}, make more visible (CUDA_VISIBLE_DEVICES), or "
        "use executor='ray' and more hosts"
    )


def _most_ranks(num_cores: int) -> int:
    return max(LEAST_MOST_RANKS, MAX_RANKS_PER_CORE * num_cores)


def _threads_per_rank(cores_of_nodes: Sequence[int], parallel: ParallelSettings) -> int:
    """Return the maximum number of threads per rank, at least 1, if possible without dividing replicas or stages."""
    tp, pp, dp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size
    for size, count in ((tp * pp, dp), (tp, pp * dp), (1, parallel.num_ranks)):
        for num_threads in range(max(cores_of_nodes), 0, -1):
            if fit_whole(cores_of_nodes, num_threads, size, count):
                return num_threads
    return 1


def _choose_executor(
    parallel: ParallelSettings, cores_of_nodes: Sequence[int] | None
) -> Literal["uniproc", "mp", "ray"]:
    if parallel.executor != "auto":
        return parallel.executor
    if cores_of_nodes is not None:
        return "ray"
    if parallel.num_ranks == 1 and parallel.on_failure in ("auto", "end"):
        return "uniproc"
    return "mp"


def _choose_dispatcher(parallel: ParallelSettings, device: str, *, prefers_deepep: bool) -> DispatcherName:
    """Return the dispatcher by which the ranks that share the experts of a layer exchange tokens."""
    wanted, num_ranks = parallel.dispatcher, parallel.num_expert_ranks
    if wanted == "auto":
        if num_ranks == 1:
            return "local"
        if device == "cpu":
            return "shared_memory"
        return "deepep" if prefers_deepep else "all_to_all"
    if wanted in ("deepep", "shared_memory") and num_ranks == 1:
        raise SettingsError(f"dispatcher={wanted!r} needs several ranks in a stage, and there is 1 rank; use 'auto'")
    if wanted == "shared_memory" and device != "cpu":
        raise SettingsError(
            f"dispatcher='shared_memory' is for CPUs, and device={device!r}; use 'all_to_all' or 'auto'"
        )
    if wanted == "deepep" and device != "cuda":
        raise SettingsError(f"dispatcher='deepep' needs GPUs, and device={device!r}; use 'all_to_all' or 'auto'")
    if wanted == "local" and num_ranks > 1:
        raise SettingsError(
            f"dispatcher='local' is for one rank, and there are {num_ranks}; use 'allgather', 'all_to_all' or 'auto'"
        )
    return wanted


def _check_deepep(parallel: ParallelSettings, dispatcher: DispatcherName) -> None:
    """Raise SettingsError if a setting of DeepEP was changed but another dispatcher is used, which would ignore it."""
    changed = parallel.changed_deepep_setting
    if changed is not None and dispatcher != "deepep":
        raise SettingsError(f"{changed} is for dispatcher='deepep', and the dispatcher is {dispatcher!r}; leave it out")


def _own_quantization(
    name: str | None, device: str, checkpoint: CheckpointFacts, machine: MachineFacts
) -> QuantizationName | None:
    """Return the setting without the name of the checkpoint's own format, which is read as it is by default.

    Raises:
        SettingsError: the name is that of another format of checkpoints.
    """
    has_kernels = name == "mxfp4" or (name == "fp8" and device == "cuda" and machine.has_float8)
    if name == checkpoint.quantization and not has_kernels:
        return None
    if name in get_args(StoredFormatName):
        stored = "not quantised" if checkpoint.quantization is None else f"stored as {checkpoint.quantization!r}"
        raise SettingsError(f"quantization={name!r}, but the checkpoint's weights are {stored}; leave quantization out")
    return cast(QuantizationName | None, name)


def _check_device(model: ModelSettings, device: str, dtype: DtypeName, machine: MachineFacts) -> None:
    """Raise SettingsError if the device is missing, or does not support the quantization or the attention backend."""
    if device == "cuda" and not machine.has_cuda:
        raise SettingsError("device='cuda', but torch sees no CUDA device; use device='cpu' or device='auto'")
    if device == "cuda" and dtype == "bfloat16" and not machine.has_bfloat16:
        source = ", the checkpoint's," if model.dtype == "auto" else ""
        raise SettingsError(
            f"dtype='bfloat16'{source} needs a GPU of compute capability 8.0 or more, such as A100; use "
            "dtype='float16' or 'float32'"
        )
    if model.attention_backend != "auto" and device != "cuda":
        raise SettingsError(
            f"attention_backend={model.attention_backend!r} is for GPUs, and device={device!r}; use 'auto'"
        )
    if model.product_backend == "deep_gemm" and (device, model.quantization) != ("cuda", "fp8"):
        raise SettingsError(
            "product_backend='deep_gemm' multiplies 8-bit blocks on GPUs, and "
            f"device={device!r}, quantization={model.quantization!r}; use 'auto'"
        )
    if model.quantization in (None, "mxfp4"):
        return
    what = f"quantization={model.quantization!r}"
    if model.quantization == "fp8":
        if device != "cuda":
            raise SettingsError(f"{what} is for GPUs, and device={device!r}; use 'int8' or 'int4' on CPUs")
        if not machine.has_float8:
            raise SettingsError(
                f"{what} needs triton (pip install 'moeserve[cuda]') and a GPU of compute capability 8.9 or more, such "
                "as H100; leave quantization out"
            )
    elif device != "cpu":
        raise SettingsError(f"{what} is for CPUs, and device={device!r}; use 'fp8' on GPUs, or device='cpu'")
    elif dtype == "float16":
        raise SettingsError(f"{what} does not support dtype='float16'; use dtype='bfloat16' or 'float32'")
    elif not machine.has_kernels:
        raise SettingsError(
            f"{what} needs the C++ kernels, and moeserve was installed without them; leave quantization out, or "
            f"{INSTALL_COMPILER}"
        )


def _has_mxfp4_kernels(device: str, machine: MachineFacts) -> bool:
    """Return True if there are kernels for experts in MXFP4, so that these need not be dequantised."""
    return machine.has_kernels if device == "cpu" else machine.has_triton


def _check_mxfp4(device: str, dtype: DtypeName, checkpoint: CheckpointFacts, machine: MachineFacts) -> None:
    """Raise SettingsError if quantization="mxfp4" is impossible."""
    if not checkpoint.has_mxfp4:
        raise SettingsError(
            f"quantization='mxfp4' keeps experts that are stored in MXFP4, and {checkpoint.path} has none; use 'int8' "
            "or 'int4' on CPUs, or 'fp8' on GPUs"
        )
    if dtype == "float16" or not _has_mxfp4_kernels(device, machine):
        raise SettingsError(
            "quantization='mxfp4' needs dtype='bfloat16' or 'float32', and the C++ kernels (CPU) or triton (GPU); "
            f"here dtype={dtype!r} and device={device!r}. Leave quantization out to dequantise the weights"
        )


def _check_batch_invariant(
    settings: Settings, device: str, dtype: DtypeName, checkpoint: CheckpointFacts, machine: MachineFacts
) -> None:
    """Raise SettingsError if results would depend on the batch or the layout with these settings."""
    model, parallel = settings.model, settings.parallel
    alike = checkpoint.tensor_parallel_sizes_alike
    refusal = None
    if parallel.tensor_parallel_size not in alike:
        refusal = (
            f"tensor_parallel_size={parallel.tensor_parallel_size}, whose sums have another order than those of one "
            f"rank; use one of {', '.join(map(str, alike))}"
        )
    elif device == "cpu" and dtype == "float16":
        refusal = "dtype='float16' on a CPU; use 'bfloat16' or 'float32'"
    elif device == "cpu" and not machine.has_kernels:
        refusal = f"an installation without the C++ kernels; {INSTALL_COMPILER}"
    elif device == "cuda" and not machine.has_triton:
        refusal = "an installation without triton (pip install 'moeserve[cuda]')"
    elif model.quantization == "fp8":
        refusal = "quantization='fp8'; leave it out"
    elif model.attention_backend not in ("auto", "triton"):
        refusal = f"attention_backend={model.attention_backend!r}; use 'auto'"
    elif parallel.dispatcher == "deepep":
        refusal = "dispatcher='deepep', which adds the outputs of experts in its own order; use 'all_to_all' or 'auto'"
    if refusal is not None:
        raise SettingsError(f"batch_invariant=True does not allow {refusal}")


def _check_layout(parallel: ParallelSettings, sizes: tuple[int, ...], machine: MachineFacts, device: str) -> None:
    """Raise SettingsError for a layout that this checkpoint, this machine or this version cannot run."""
    tp, num_ranks = parallel.tensor_parallel_size, parallel.num_ranks
    layout, nodes, num_gpus = shown_layout(parallel), machine.cores_of_nodes, machine.num_gpus
    if tp not in sizes:
        raise SettingsError(
            f"tensor_parallel_size={tp} does not divide the checkpoint's attention heads; "
            f"use one of {', '.join(map(str, sizes))}"
        )
    if num_ranks > 1 and parallel.executor == "uniproc":
        raise SettingsError(f"executor='uniproc' runs one rank, but {layout} needs {num_ranks}; use executor='mp'")
    if parallel.on_failure in ("restart", "shrink") and parallel.executor == "uniproc":
        raise SettingsError(
            f"on_failure={parallel.on_failure!r} starts processes of ranks again, but with executor='uniproc' the rank "
            "runs in this one; use executor='mp'"
        )
    num_threads = parallel.num_threads or 1
    if nodes is None and num_ranks > (most := _most_ranks(machine.num_cores)):
        raise SettingsError(
            f"{layout} needs {num_ranks} ranks, but this process may use {machine.num_cores} CPU cores; use at most "
            f"{most} ranks (one per core for speed), or executor='ray' and more hosts"
        )
    if nodes is not None and num_ranks > (room := sum(cores // num_threads for cores in nodes)):
        raise SettingsError(
            f"{layout} needs {num_ranks} ranks with num_threads={num_threads}, but the nodes of the Ray cluster have "
            f"{', '.join(map(str, nodes))} CPUs, room for {room}; use fewer ranks or threads, or more nodes"
        )
    if num_ranks > 1 and parallel.step_timeout <= parallel.collective_timeout:
        raise SettingsError(
            f"step_timeout={parallel.step_timeout} is not more than collective_timeout={parallel.collective_timeout}, "
            "whose error names the rank that is late; raise step_timeout, or lower collective_timeout"
        )
    if device == "cuda" and num_ranks > 1 and not machine.has_nccl:
        raise SettingsError(f"{layout}: torch {WITHOUT_NCCL}")
    if device == "cuda" and nodes is None and num_gpus is not None and num_ranks > num_gpus:
        raise SettingsError(too_few_gpus(parallel, num_gpus))


def _check_expert_placement(parallel: ParallelSettings, checkpoint: CheckpointFacts) -> None:
    """Raise SettingsError if this layout does not support the redundant experts or the rebalancing."""
    num_ranks = parallel.num_expert_ranks
    num_redundant = parallel.num_redundant_experts
    most = checkpoint.num_experts * (num_ranks - 1)  # one copy of each expert per rank
    if num_redundant > most:
        raise SettingsError(
            f"num_redundant_experts={num_redundant}: {num_ranks} ranks have room for {most} redundant copies of "
            f"{checkpoint.num_experts} experts, one of each expert per rank; use at most {most}"
        )
    if parallel.rebalance == "auto" and num_ranks == 1:
        raise SettingsError(
            "rebalance='auto' moves experts between the ranks of a stage, and there is one; use rebalance='off'"
        )
    if parallel.rebalance not in ("off", "auto") and parallel.expert_loads is not None:
        raise SettingsError(
            f"rebalance={shown(parallel.rebalance)} and expert_loads={shown(parallel.expert_loads)} both place the "
            "experts; leave one of them out"
        )


def _dtype_of_checkpoint(
    checkpoint: CheckpointFacts, device: str, quantization: str | None, machine: MachineFacts
) -> DtypeName:
    """Return the dtype to compute in if the user chooses none: the checkpoint's, unless that is slow."""
    if checkpoint.dtype != "float16" or (device == "cuda" and quantization not in ("int8", "int4")):
        return checkpoint.dtype
    dtype: DtypeName = "bfloat16" if machine.has_kernels or device == "cuda" else "float32"
    logger.warning(
        "%s has weights in float16, for which there are no fast kernels here; computing in %s, unless "
        "dtype='float16' is set",
        checkpoint.path,
        dtype,
    )
    return dtype


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


def _check_overlap(model: ModelSettings, parallel: ParallelSettings, checkpoint: CheckpointFacts, device: str) -> None:
    """Raise SettingsError if this device, model or layout does not support steps in halves."""
    if (parallel.overlap_decode_tokens, parallel.overlap_prefill_tokens) == (None, None):
        return
    refusal = None
    if parallel.num_expert_ranks == 1:
        refusal = "a single rank in a stage, which exchanges nothing; leave them out"
    elif checkpoint.needs.keeps_state:  # the second half of a prompt needs the state after the first half
        refusal = "models with recurrent states; leave them out"
    elif device != "cuda":
        return
    elif parallel.tensor_parallel_size > 1:  # collectives of both groups would be in flight at the same time
        refusal = f"tensor_parallel_size={parallel.tensor_parallel_size}; use 1, and more replicas"
    elif model.attention_backend == "flashinfer":  # both halves would use up the wrappers of two steps (`Plans`)
        refusal = "attention_backend='flashinfer'; use 'auto'"
    if refusal is not None:
        raise SettingsError(f"overlap_decode_tokens and overlap_prefill_tokens do not allow {refusal}")


def _on_failure(parallel: ParallelSettings, executor: str) -> Literal["end", "restart", "shrink"]:
    if parallel.on_failure != "auto":
        return parallel.on_failure
    return "restart" if executor == "ray" else "end"


def is_float8_cache(kv_cache_dtype: CacheDtypeName, needs: Needs) -> bool:
    """Return True if keys and values are stored as 8-bit floats.

    Raises:
        SettingsError: 8-bit floats are required, but the model's caches do not support them.
    """
    if kv_cache_dtype != "auto" and not needs.fits_float8_cache:
        raise SettingsError(
            f"kv_cache_dtype={kv_cache_dtype!r} does not support models with latent attention (MLA) or compressed "
            "entries, whose cache is small as it is; use kv_cache_dtype='auto'"
        )
    return kv_cache_dtype != "auto"


def _check_needs(settings: Settings, needs: Needs, device: str) -> None:
    """Raise SettingsError for settings that the networks of a model do not support."""
    cache = settings.cache
    if device == "cuda" and settings.model.batch_invariant and needs.without_gpu_order is not None:
        raise SettingsError(
            f"batch_invariant=True: on GPUs, {needs.without_gpu_order}, which this model has, have no kernels whose "
            "sums have one order; leave it out or use device='cpu'"
        )
    redoes_drafts = needs.redoes_drafts and settings.scheduler.speculative_config is not None
    if device == "cuda" and redoes_drafts:
        raise SettingsError(
            "speculative_config: on GPUs, the kernels for compressed entries would keep the state of rejected draft "
            "tokens; leave it out or use device='cpu'"
        )
    overlap = settings.parallel.overlap_decode_tokens or settings.parallel.overlap_prefill_tokens
    if redoes_drafts and overlap:
        raise SettingsError(
            "speculative_config: with overlap_decode_tokens or overlap_prefill_tokens, draft tokens could be in both "
            "halves of a step, and this model keeps no state after the first of them; leave one of the settings out"
        )
    if cache.block_size and cache.block_size % needs.block_multiple:
        raise SettingsError(
            f"block_size={cache.block_size}: an entry of this model stands for {needs.block_multiple} tokens, and "
            f"blocks must have whole entries; use a multiple of {needs.block_multiple}"
        )


def _num_saved_states(cache: CacheSettings, checkpoint: CheckpointFacts, max_num_seqs: int) -> int | None:
    """Return the number of rows for saved states, or None if the model has no recurrent states.

    Raises:
        SettingsError: `num_saved_states` is set, but the model has no recurrent states.
    """
    if not checkpoint.needs.keeps_state:
        if cache.num_saved_states is not None:
            raise SettingsError(
                f"num_saved_states={cache.num_saved_states}: this model has no recurrent states; leave it out"
            )
        return None
    if not cache.enable_prefix_caching:
        return 0
    return max_num_seqs if cache.num_saved_states is None else cache.num_saved_states


def _check_kv_store(cache: CacheSettings) -> None:
    """Raise SettingsError if the settings of the store behind the KV cache contradict each other."""
    if cache.kv_folder is not None and cache.kv_host_memory != 0:
        raise SettingsError(
            f"kv_folder={cache.kv_folder!r} and kv_host_memory={shown(cache.kv_host_memory)} exclude each other; "
            "choose one store behind the KV cache"
        )
    if cache.kv_file is not None and cache.kv_host_memory == 0:
        raise SettingsError(f"kv_file={cache.kv_file!r} needs the size of the file: kv_host_memory")
    uses_prefixes = (cache.kv_folder, cache.kv_transfer_address) != (None, None) or cache.kv_host_memory != 0
    if not cache.enable_prefix_caching and uses_prefixes:
        raise SettingsError(
            "kv_host_memory, kv_folder and kv_transfer_address need the prefix cache: enable_prefix_caching=True"
        )
    if cache.kv_transfer_address is not None:
        _, colon, port = cache.kv_transfer_address.partition(":")
        if colon and not (port.isdecimal() and 0 < int(port) < 2**16):
            raise SettingsError(
                f"kv_transfer_address={shown(cache.kv_transfer_address)}: {port!r} is not a port; an example is "
                "10.0.0.1:7000"
            )
        if cache.kv_transfer_backend == "nixl" and cache.kv_transfer_key_file is None:
            raise SettingsError(
                "kv_transfer_backend='nixl' lets others read this engine's memory and needs a key: kv_transfer_key_file"
            )
    elif cache.kv_transfer_key_file is not None:
        raise SettingsError(
            f"kv_transfer_key_file={shown(cache.kv_transfer_key_file)} is for engines with a kv_transfer_address"
        )
