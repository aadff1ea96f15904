"""Every setting of the engine: what a user may ask for (`Settings`) and what was decided (`EngineConfig`).

Knows no tensors and no files: `resolve` is told the facts about the checkpoint and the machine, and turns
every "auto" into one of them, once.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from moeserve.errors import SettingsError, nearest, shown

# Bounds that no sensible value reaches, so that a slip of the pen is an error here and not far inside the engine.
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
MAX_BYTES = 2**50
# More ranks than cores are slower than fewer; some are good for trying a layout out, more are a slip of the pen.
MAX_RANKS_PER_CORE = 4
LEAST_MOST_RANKS = 8
DEFAULT_LOAD_WINDOW = 256  # steps
DtypeName = Literal["float32", "bfloat16", "float16"]
QuantizationName = Literal["int8", "int4", "fp8"]
DispatcherName = Literal["local", "allgather", "all_to_all", "deepep"]
AttentionName = Literal["measured", "triton", "flashinfer", "varlen"]  # whose attention a GPU runs
WITHOUT_NCCL = (  # of a torch
    "was built without NCCL, over which ranks on GPUs talk; install one for CUDA (https://pytorch.org/get-started), "
    "or use one rank, or device='cpu'"
)


def setting(default: Any, help: str) -> Any:
    """A field of a settings group: its default, and the sentence that `--help` shows."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Model"""

    model: str | None = setting(
        None, "folder of a checkpoint in Hugging Face layout; none: the default model, made once"
    )
    tokenizer: str | None = setting(None, "folder of the tokenizer; none: the checkpoint's own")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "number format of weights, activations and KV cache; auto: the checkpoint's"
    )
    quantization: QuantizationName | None = setting(
        None,
        "number format that projections and experts are quantised to while they are loaded; on a CPU, int8: one scale "
        "per output, int4: one per 32 weights; on a GPU, fp8: one per 128 x 128 weights, taken as they are from "
        "checkpoints stored so; none: as dtype says",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where tensors live; auto: cpu")
    attention_backend: Literal["auto", "triton", "flashinfer", "varlen"] = setting(
        "auto",
        "what attends on a GPU; triton: moeserve's own kernels; flashinfer, or torch's varlen: that library, and ours "
        "where it cannot; auto: the one that bench.gpu.tune_attention has measured to be fastest, else ours",
    )
    load_format: Literal["auto", "dummy"] = setting("auto", "dummy: random weights, only config.json is read")
    packed_cache: int | str = setting(
        "16GiB",
        "bytes of packed weights kept in the cache folder, as a number or like 16GiB, so that the next start takes "
        "a second; the least recently used go first; 0: none",
    )
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = setting(
        0, "seeds dummy weights, and the sampling of requests that bring no seed"
    )
    max_model_len: Annotated[int, msgspec.Meta(ge=2, le=2**31 - 1)] | None = setting(
        None, "most tokens of one request, prompt and output; none: what the model and the KV cache allow"
    )


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """KV cache"""

    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = setting(16, "tokens per block of the KV cache")
    kv_cache_memory: int | str | None = setting(
        None, "bytes of the KV cache, as a number or like 512MiB; none: measured by a profiling run"
    )
    enable_prefix_caching: bool = setting(True, "keep the blocks of finished requests for prompts that begin alike")


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Scheduling"""

    max_num_seqs: PositiveInt | None = setting(
        None, "most requests that run in one step; none: 64 on a CPU, 256 on a GPU"
    )
    max_num_batched_tokens: PositiveInt | None = setting(
        None, "most tokens computed in one step; none: 2048 on a CPU, 8192 on a GPU"
    )
    enforce_eager: bool = setting(
        False, "run the layers of each step anew; otherwise ranks on a CPU record their decode steps and play them"
    )


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """Parallelism"""

    tensor_parallel_size: PositiveInt = setting(1, "ranks that share the attention heads of one replica")
    data_parallel_size: PositiveInt = setting(1, "replicas that run in lockstep")
    pipeline_parallel_size: PositiveInt = setting(1, "stages that the layers are divided into")
    executor: Literal["auto", "uniproc", "mp", "ray"] = setting(
        "auto",
        "what runs the ranks; uniproc: this process, mp: processes on this host, ray: actors on the nodes of a Ray "
        "cluster; auto: for several ranks ray inside a Ray cluster, or where this host has too few cores, else mp",
    )
    ray_compiled_graph: bool = setting(
        True, "with Ray: a step reaches its ranks through a compiled graph, not by calls of actors"
    )
    network_interface: str | None = setting(
        None, "with Ray: where ranks meet, by name (eth1) or subnet (10.1.0.0/16); none: as Ray's nodes know each other"
    )
    dispatcher: Literal["auto", "local", "allgather", "all_to_all", "deepep"] = setting(
        "auto",
        "what carries tokens to their experts; local: no exchange; allgather: every rank gets every token; "
        "all_to_all: every rank gets the tokens that its experts need; deepep: the same between GPUs, by DeepEP; auto: "
        "between GPUs deepep if it can, else all_to_all",
    )
    deepep_low_latency_tokens: Annotated[int, msgspec.Meta(ge=0, le=8192)] = setting(
        128, "with DeepEP: steps to which no rank brings more tokens go by its kernels for few; 0: none do"
    )
    deepep_float8: bool = setting(False, "with DeepEP: rows travel to experts as 8-bit floats")
    num_redundant_experts: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = setting(
        0, "slots for second and further copies of experts in each layer, over all ranks together"
    )
    expert_loads: str | None = setting(
        None,
        'JSON file {"loads": [[...], ...]}, or the .jsonl of expert_load_file: how many tokens each expert of each '
        "layer gets; experts are placed so that ranks have equal work, hot ones get the copies; none: experts in their "
        "order",
    )
    rebalance: str = setting(
        "off",
        "auto: experts change ranks while they serve, as their loads change; off: they stay; else a file with "
        "placements, as LLM.save_placement writes it",
    )
    rebalance_horizon: PositiveInt = setting(
        10000, "with rebalance=auto: steps in which a new placement must gain more time than moving experts costs"
    )
    num_threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = setting(
        None, "CPU threads of each rank; none: the cores this process may use, divided by the ranks on this host"
    )
    collective_timeout: Annotated[int, msgspec.Meta(ge=5, le=86400)] = setting(  # well above an idle replica's second
        300, "seconds that a rank waits for the others in one exchange before it reports a fault"
    )
    debug_collectives: bool = setting(
        False, "check before each exchange between ranks that all of them are about to do the same"
    )


@dataclass(frozen=True, kw_only=True)
class TelemetrySettings:
    """Telemetry"""

    expert_load_window: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = setting(
        None,
        f"steps after which all ranks tell what their experts were given; none: {DEFAULT_LOAD_WINDOW} if a file "
        "or metrics want it, or experts may move; else only when asked",
    )
    expert_load_file: str | None = setting(
        None, "file to which a line of JSON is added for each window: what each expert and rank of each layer was given"
    )
    metrics_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = setting(
        None, "port of this host, on the loopback interface, where Prometheus finds the metrics; none: nowhere"
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for, group by group."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)

    @classmethod
    def groups(cls) -> dict[str, type]:
        """The groups of settings: field name and class."""
        return get_type_hints(cls)

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Settings:
        """Settings from flat keyword options, as `LLM(...)` takes them.

        Raises:
            SettingsError: an unknown option (names the nearest), a wrong type, or a value out of range.
        """
        groups = cls.groups()
        group_of_option = {f.name: name for name, group in groups.items() for f in dataclasses.fields(group)}
        chosen: dict[str, dict[str, Any]] = {name: {} for name in groups}
        for option, value in options.items():
            if option not in group_of_option:
                raise SettingsError(f"unknown setting {option!r}: {nearest(option, group_of_option)}")
            name = group_of_option[option]
            chosen[name][option] = _checked(option, value, groups[name])
        return cls(**{name: group(**chosen[name]) for name, group in groups.items()})


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


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What was decided: facts only, no "auto" left. The one object that every rank is built from."""

    model_path: str
    tokenizer_path: str
    vocab_size: int
    dtype: DtypeName
    quantization: QuantizationName | None
    device: Literal["cpu", "cuda"]
    attention_backend: AttentionName
    load_format: Literal["auto", "dummy"]
    packed_cache: int  # bytes
    seed: int
    max_model_len: int
    max_model_len_may_shrink: bool  # the user left it open: a small KV cache lowers it instead of refusing
    block_size: int
    kv_cache_memory: int | None  # bytes; None: a profiling run measures it
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel_size: int
    data_parallel_size: int
    enforce_eager: bool
    num_threads: int  # of each rank
    executor: Literal["uniproc", "mp", "ray"]
    ray_compiled_graph: bool
    network_interface: str | None
    dispatcher: DispatcherName
    dispatcher_may_change: bool  # from deepep to all_to_all, where ranks find that it cannot serve
    deepep_low_latency_tokens: int
    deepep_float8: bool
    num_redundant_experts: int  # in each layer
    expert_loads: tuple[tuple[float, ...], ...]  # by layer with experts, by expert; empty: unknown
    placements: tuple[str, ...]  # of each layer with experts, as JSON; empty: by loads
    rebalance: Literal["off", "auto"]
    rebalance_horizon: int  # steps
    collective_timeout: int  # seconds
    debug_collectives: bool
    expert_load_window: int  # steps; 0: only when asked
    expert_load_file: str | None
    metrics_port: int | None

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size


@dataclass(frozen=True)
class Limits:
    """Bounds on what one request may ask for, so that none can exhaust the machine."""

    max_n: int = 128
    max_logprobs: int = 64
    max_stop_strings: int = 64
    max_stop_string_length: int = 1024  # characters
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 4096


LIMITS = Limits()


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
        return _is_inside_ray() or num_ranks > _most_ranks(num_cores)
    return parallel.executor == "ray"


def ray_address() -> str:
    """The Ray cluster that this process was told to use, as Ray reads it; "" if there is none."""
    return os.environ.get("RAY_ADDRESS", "")


def ray_temporary_folder() -> str:
    """Where Ray keeps what it knows of this host's cluster, if the user has said so; "": where temporary files go."""
    return os.environ.get("RAY_TMPDIR", "")


def _is_inside_ray() -> bool:
    """Whether this process belongs to a Ray cluster, or was told of one."""
    ray = sys.modules.get("ray")
    return bool(ray_address()) or (ray is not None and bool(ray.is_initialized()))


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


def parse_bytes(option: str, amount: int | str, *, least: int = 1) -> int:
    """Bytes of an amount such as 1048576, "512MiB", "2 GB" or "1.5GiB"; the option is named in errors."""
    if isinstance(amount, int):
        num_bytes = amount
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", amount)
        if match is None:
            raise SettingsError(f"{option}={shown(amount)} is not an amount of memory; write it like 512MiB or 2GB")
        prefix = match[2] or ""
        base = 1024 if prefix.endswith("i") else 1000
        num_bytes = int(min(float(match[1]), 1e30) * base ** " KMGT".index(prefix[:1] or " "))
    if not least <= num_bytes <= MAX_BYTES:
        raise SettingsError(f"{option}={shown(amount)} must be from {least} to {MAX_BYTES} bytes")
    return num_bytes


def cache_folder() -> Path:
    """Where made models are kept: $MOESERVE_CACHE, else moeserve/ in the user's cache folder."""
    chosen = os.environ.get("MOESERVE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moeserve"


def _checked(option: str, value: Any, group: type) -> Any:
    expected = get_type_hints(group, include_extras=True)[option]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    try:
        return msgspec.convert(value, expected, strict=True)
    except msgspec.ValidationError as error:
        help = next(f.metadata["help"] for f in dataclasses.fields(group) if f.name == option)
        is_choice = get_origin(expected) is Literal
        reason = f"must be one of {get_args(expected)}" if is_choice else str(error).split(" - at ")[0]
        raise SettingsError(f"{option}={shown(value)}: {reason} ({option}: {help})") from None


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


def set_for_libraries(wanted: Mapping[str, str]) -> None:
    """Variables by which libraries in this process are told; what the user has set stays."""
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def nvshmem_queue_depth(default: int) -> int:
    """NVSHMEM_QP_DEPTH, which DeepEP's low-latency kernels go by.

    Raises:
        SettingsError: it is no number.
    """
    told = os.environ.get("NVSHMEM_QP_DEPTH", str(default))
    if not told.isdecimal():
        raise SettingsError(
            f"NVSHMEM_QP_DEPTH={told!r} is not a number; unset it, or give it a number such as {default}"
        )
    return int(told)


def environment_without(name: str) -> dict[str, str]:
    """This process's environment but for one variable, for a child."""
    return {each: value for each, value in os.environ.items() if each != name}


def ray_token() -> str:
    """The secret that nodes of a Ray cluster share, found where Ray looks for it; "": there is none."""
    told = os.environ.get("RAY_AUTH_TOKEN", "")
    if is_token_refused() or told:
        return "" if is_token_refused() else told
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        why = f"the Ray token cannot be read: {error}; set RAY_AUTH_TOKEN, or RAY_AUTH_MODE=disabled"
        raise SettingsError(why) from None


def is_token_refused() -> bool:
    """Whether the user said that Ray is to ask for no token."""
    return os.environ.get("RAY_AUTH_MODE", "token") != "token"


def environment_of_cluster(address: str, token: str) -> dict[str, str]:
    """The environment for Ray's own processes, and for programs that are to use the cluster."""
    environment = dict(os.environ)
    # A node that has died is noticed within seconds. Ray's defaults take half a minute, and a minute on the other side.
    for name, value in {
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "4",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    }.items():
        environment.setdefault(name, value)
    environment["RAY_ADDRESS"] = address
    # Said in any case: of Ray's own programs some look for a token where nothing is said, and others do not.
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
    return environment


def environment_of_rank(config: EngineConfig, num_cores: int) -> dict[str, str]:
    """The environment for a process that runs one rank."""
    environment = dict(os.environ)
    if config.num_ranks * config.num_threads > num_cores:
        # Threads that wait awake would take the cores from those that work.
        environment["OMP_WAIT_POLICY"] = "passive"
    return environment
