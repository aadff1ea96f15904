"""The resolved settings of an engine, in parts: one for each part of the engine that reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from moeserve.config.hub_name import HubModel
from moeserve.config.routes import RouteShape
from moeserve.config.settings import (
    AttentionChoice,
    DeepEPApi,
    DispatcherName,
    DtypeName,
    LogprobsMode,
    ModelImplName,
    ProductChoice,
    QuantizationName,
    SpeculativeConfig,
)

DeviceName = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """The checkpoint, and the number formats in which it is loaded."""

    model_path: str
    hub_model: HubModel | None  # repository of the model, and the commit; None: the model is not from a hub
    hf_overrides: dict[str, Any] | None
    model_impl: ModelImplName
    dtype: DtypeName
    quantization: QuantizationName | None
    load_format: Literal["auto", "dummy"]
    ignore_unused_weights: bool
    packed_cache: int  # bytes
    experts_on_host: bool  # the host of a GPU computes the routed experts, to which `quantization` then applies
    num_cpu_layers: int | None  # number of the first layers, whose experts are on the host; None: all layers
    expert_memory: int | float | Literal["auto"] | None  # bytes of each rank, or a share; None: all are in memory
    expert_store: str | None  # folder of experts that are not in memory; None: one in the cache folder
    seed: int  # seed of dummy weights and of sampling
    file_hashes: tuple[tuple[str, str], ...]  # files that the first ranks have read, with their hashes; empty before
    rl: bool  # a trainer may update the weights


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The tokenizer, the defaults of sampling parameters, and the form of log-probabilities."""

    tokenizer_path: str
    hub_tokenizer: HubModel | None  # repository and commit of a tokenizer that is not the model's; otherwise None
    vocab_size: int
    has_generation_config: bool  # sampling parameters of generation_config.json are the defaults
    override_generation_config: tuple[tuple[str, Any], ...]  # sampling parameters that replace these defaults
    logprobs_mode: LogprobsMode


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """The device of each rank, and how it computes."""

    device: DeviceName
    attention_backend: AttentionChoice
    product_backend: ProductChoice
    batch_invariant: bool  # batch invariance is required; CPU kernels may provide it in any case
    enforce_eager: bool
    num_threads: int  # threads of each rank
    numa_binding: bool  # False unless all ranks are on the CPU of one host


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache and recurrent states."""

    block_size: int
    has_float8_cache: bool  # keys and values are 8-bit floats; otherwise they have the dtype of weights
    kv_cache_memory: int | None  # bytes; None: a profiling run measures it
    memory_share: float  # see `DeviceDefaults`
    # minimum if a profiling run measures after a change of the number of replicas; None: no minimum
    num_cache_blocks: int | None
    enable_prefix_caching: bool
    redoes_drafts: bool  # accepted drafts must be computed again; see `Needs`
    num_saved_states: int | None  # rows for copies of recurrent states; None: no layer of the model has a state


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """The store behind the KV cache, and transfers between engines."""

    kv_host_memory: int  # bytes of the store behind the KV cache of each rank; 0: none
    kv_file: str | None  # folder of the store's file; None: the store is in memory
    kv_folder: str | None  # folder with blocks shared by several engines; None: none
    kv_folder_size: int  # bytes for each rank
    kv_transfer_address: str | None  # address at which ranks serve blocks to other engines; None: they do not
    kv_transfer_key_file: str | None
    kv_transfer_backend: Literal["tcp", "nixl"]
    kv_transfer_timeout: int  # seconds


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Limits on requests and steps, and speculative decoding."""

    max_model_len: int
    max_model_len_may_shrink: bool  # True if the user did not set it, so that a small KV cache may reduce it
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_batched_tokens_may_shrink: bool  # True if the user did not set it: it is then the most that is tried
    max_prefill_tokens: int
    max_queued_requests: int
    async_scheduling: bool
    max_concurrent_batches: int
    longest_turn_wait: float  # seconds; 0: decoding requests take no turns
    speculative_config: SpeculativeConfig | None

    @property
    def num_mtp_drafts(self) -> int:
        """Number of tokens that the modules for multi-token prediction (MTP) draft after each step."""
        speculation = self.speculative_config
        return 0 if speculation is None or speculation.method != "mtp" else speculation.num_speculative_tokens

    @property
    def num_lookahead_tokens(self) -> int:
        """Number of positions after the last draft that drafting computes.

        With one MTP module, each of its passes except the first computes one such position.
        """
        return max(0, self.num_mtp_drafts - 1)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout of ranks, and where they run."""

    tensor_parallel_size: int
    data_parallel_size: int
    pipeline_layers: tuple[int, ...]  # number of layers of each stage
    num_ranks_on_host: int | None = None  # number of ranks on this rank's host; None: all ranks
    executor: Literal["uniproc", "mp", "ray"]
    nnodes: int
    ray_compiled_graph: bool
    network_interface: str | None

    @property
    def pipeline_parallel_size(self) -> int:
        return len(self.pipeline_layers)

    def layers_of_stage(self, stage: int) -> range:
        """Return the indices of a stage's layers."""
        first = sum(self.pipeline_layers[:stage])
        return range(first, first + self.pipeline_layers[stage])

    @property
    def ranks_per_replica(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_ranks(self) -> int:
        return self.ranks_per_replica * self.data_parallel_size

    @property
    def num_sharing_ranks(self) -> int:
        """Number of ranks that share the memory of this rank's host."""
        return self.num_ranks_on_host or self.num_ranks


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The placement of experts on ranks, and the exchange of tokens."""

    expert_parallel: bool  # False: each tp rank holds a slice of every expert
    dispatcher: DispatcherName
    dispatcher_may_change: bool  # fall back to all_to_all if ranks find that the chosen dispatcher cannot run
    deepep_low_latency_tokens: int
    deepep_api: DeepEPApi | None  # None: the newest that the installed package supports
    deepep_float8: bool
    overlap_decode_tokens: int | None  # minimum tokens of the largest replica for overlapped steps; None: never
    overlap_prefill_tokens: int | None
    num_redundant_experts: int  # redundant experts of each layer
    expert_loads: tuple[tuple[float, ...], ...]  # for each layer with experts, the load of each; empty: unknown
    placements: tuple[str, ...]  # for each layer with experts, its placement as JSON; empty: computed from loads
    rebalance: Literal["off", "auto"]
    rebalance_horizon: int  # steps
    routes: RouteShape | None  # shape of the routed experts that outputs return; None: outputs return none


@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """Limits of time, what follows a failure, and checks for debugging."""

    collective_timeout: int  # seconds
    detect_hangs: bool
    load_timeout: int  # seconds
    step_timeout: int  # seconds
    weight_update_timeout: int  # seconds
    on_failure: Literal["end", "restart", "recover", "shrink"]
    debug_collectives: bool
    debug_rank_state: bool  # all ranks report their state after each round


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Reports of expert load."""

    expert_load_window: int  # steps between collections; 0: only on request
    expert_load_file: str | None
    metrics_port: int | None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Resolved settings, without "auto". Every rank is built from this object."""

    weights: WeightsConfig
    texts: TextConfig
    compute: DeviceConfig
    cache: CacheConfig
    store: StoreConfig
    schedule: ScheduleConfig
    parallel: ParallelConfig
    experts: ExpertsConfig
    failure: FailureConfig
    telemetry: TelemetryConfig

    def changed(self, **parts: dict[str, Any]) -> EngineConfig:
        """Return a config in which some fields have other values, given by part."""
        return replace(self, **{name: replace(getattr(self, name), **fields) for name, fields in parts.items()})

    def settings(self) -> dict[str, Any]:
        """Return the fields of all parts by name."""
        return {name: value for part in vars(self).values() for name, value in vars(part).items()}

    @property
    def gathers_reports(self) -> bool:
        """True if all ranks report after each round; otherwise only the ranks that sample do."""
        return self.failure.debug_rank_state or self.experts.routes is not None

    @property
    def recovers_in_place(self) -> bool:
        """True if, after a failure, the ranks that have not failed wait for new ranks in place of the failed ones."""
        return self.failure.on_failure in ("recover", "shrink") and self.parallel.executor == "mp"

    @property
    def max_requests_in_flight(self) -> int:
        """Maximum number of running and waiting requests of all replicas together."""
        return self.schedule.max_num_seqs * self.parallel.data_parallel_size + self.schedule.max_queued_requests
