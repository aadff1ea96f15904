"""Every setting: what a user may choose (`Settings`), and the resolved `EngineConfig`."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from moeserve.errors import SettingsError, nearest, shown

# Bounds that no sensible value reaches, so that a slip of the pen is an error here and not far inside the engine.
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
MAX_BYTES = 2**50
DEFAULT_LOAD_WINDOW = 256  # steps
DtypeName = Literal["float32", "bfloat16", "float16"]
QuantizationName = Literal["int8", "int4", "fp8"]
DispatcherName = Literal["local", "allgather", "all_to_all", "deepep"]
AttentionName = Literal["measured", "triton", "flashinfer", "varlen"]  # whose attention a GPU runs


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
