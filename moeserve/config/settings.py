"""Settings as a user gives them, by group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from moeserve.errors import shown

# Upper bounds only catch typing errors: they are above all sensible values.
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
DEFAULT_LOAD_WINDOW = 256  # steps
DtypeName = Literal["float32", "bfloat16", "float16"]
CacheDtypeName = Literal["auto", "fp8", "fp8_e4m3"]
QuantizationName = Literal["int8", "int4", "fp8", "mxfp4"]
# Formats of checkpoints, as their configs name them, that are not QuantizationNames.
StoredFormatName = Literal["awq", "gptq", "auto-round", "compressed-tensors", "fbgemm_fp8", "modelopt", "gguf"]
DeepEPApi = Literal["legacy", "elastic"]
DispatcherName = Literal["local", "allgather", "all_to_all", "shared_memory", "deepep"]
ModelImplName = Literal["moeserve", "transformers"]
AttentionName = Literal["triton", "flashinfer"]  # attention kernels on a GPU
ProductName = Literal["triton", "deep_gemm"]  # kernels of products in 8-bit blocks on a GPU
AttentionChoice = AttentionName | Literal["measured"]  # measured: the fastest by measurements on this GPU
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
ProductChoice = ProductName | Literal["measured"]


def setting(default: Any, help: str) -> Any:
    """Return a dataclass field with its default and the text that `--help` shows."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Model"""

    model: str | None = setting(
        None,
        "checkpoint folder, GGUF file, or OWNER/NAME in a hub (OWNER/NAME:FILE for a GGUF file or its "
        "quantisation); none: the default model",
    )
    tokenizer: str | None = setting(None, "folder, or OWNER/NAME in a hub; none: the checkpoint's")
    revision: str | None = setting(None, "branch, tag or commit in a hub; none: the main branch")
    tokenizer_revision: str | None = setting(
        None, "the same of a tokenizer; none: the main branch, or revision without tokenizer"
    )
    download_dir: str | None = setting(
        None, "folder of files from a hub; none: HF_HUB_CACHE, or ~/.cache/huggingface/hub"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float", "half"] = setting(
        "auto",
        "number format of weights, activations and, with kv_cache_dtype=auto, the KV cache; auto: the checkpoint's",
    )
    quantization: QuantizationName | StoredFormatName | None = setting(
        None,
        "quantise projections and experts while loading; on a CPU: int8 (a scale per output) or int4 (Q4_K,"
        " and Q5_K, Q6_K or int8 where errors matter more); on a GPU: fp8 (a scale per 128 x 128 weights); codes of a "
        "checkpoint in int4 or fp8 are kept; mxfp4: experts as a checkpoint in MXFP4 stores them, which is "
        "the default in bfloat16; other names: the format of the checkpoint, as without the setting",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "device of all tensors; auto: cpu")
    attention_backend: Literal["auto", AttentionName] = setting(
        "auto",
        "attention on a GPU; triton: moeserve's kernels; flashinfer: that library where it can; auto: the "
        "faster one in measurements on this GPU, else triton",
    )
    product_backend: Literal["auto", ProductName] = setting(
        "auto",
        "products of 8-bit blocks on a GPU, with quantization=fp8; triton: moeserve's kernels; deep_gemm: "
        "DeepGEMM where it can; auto: the faster one in measurements on this GPU, else triton",
    )
    batch_invariant: bool = setting(
        False,
        "results depend on the request alone, to the bit; settings that exclude it are errors; slower on a "
        "GPU; a CPU does so wherever it can",
    )
    hf_overrides: dict[str, Any] | None = setting(
        None,
        'changes to config.json, such as {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}; objects are merged',
    )
    load_format: Literal["auto", "dummy"] = setting("auto", "dummy: random weights; only config.json is read")
    ignore_unused_weights: bool = setting(
        False,
        "load a checkpoint with tensors that the model does not read and that could change its output; "
        "otherwise an error",
    )
    model_impl: Literal["auto", ModelImplName] = setting(
        "auto",
        "transformers: run a model without a family through transformers' code; slower; auto: moeserve's own code",
    )
    packed_cache: int | str = setting(
        "16GiB",
        "size of the cache of packed weights on disk, which makes the next start fast, like 16GiB; 0: no cache",
    )
    expert_device: Literal["auto", "cpu"] = setting(
        "auto",
        "cpu: with device='cuda' and one GPU, the host keeps and computes the routed experts, in int8 or int4 if "
        "quantization says so, and the GPU all else; auto: experts are on the device of the model",
    )
    num_cpu_layers: PositiveInt | None = setting(
        None,
        "with expert_device='cpu': the number of the model's first layers whose experts are on the host; the GPU keeps "
        "those of the others; none: all layers",
    )
    expert_memory: int | str | None = setting(
        None,
        "memory of each rank for routed experts, like 8GiB or 25%, on CPUs; those that do not fit are read from a copy "
        "on disk when tokens need them; auto: what is free; none: all experts must fit in memory",
    )
    expert_store: str | None = setting(
        None, "folder of that copy, on a fast disk; none: experts in the folder of moeserve's cache"
    )
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = setting(
        0, "seed of dummy weights and of requests without a seed; none: a random one, which is logged"
    )
    max_model_len: int | str | None = setting(
        None,
        "most tokens of one request, prompt and output, also as 32k (32000) or 32K (32768); none, -1, auto: "
        "what the model and the KV cache allow",
    )
    generation_config: Literal["auto", "vllm"] = setting(
        "auto",
        "default sampling parameters; auto: those of generation_config.json; vllm: those of SamplingParams",
    )
    override_generation_config: dict[str, Any] | None = setting(
        None, 'sampling parameters that replace these defaults, such as {"temperature": 0.5}'
    )
    rl: bool = setting(
        False,
        "let a trainer update the weights (docs/rl.md); moeserve serve then has trainers' routes, which need the "
        "administrator's key, or no key with --rl-without-key",
    )
    logprobs_mode: LogprobsMode = setting(
        "raw_logprobs",
        "what logprobs and prompt_logprobs return; raw: the model's; processed: those with which a token is "
        "drawn, after bias, penalties, temperature, min_p, top_k and top_p (for a prompt: after the temperature "
        "only); logits: not normalised",
    )
    enable_return_routed_experts: bool = setting(
        False, "outputs have the experts of their tokens, and LLM.score may be given them (docs/rl.md); on CPUs"
    )


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """KV cache"""

    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = setting(
        None, "tokens per block; none: 16, or 128 for DeepSeek-V4"
    )
    kv_cache_memory: int | str | None = setting(
        None, "size on each rank, like 512MiB; none: measured by a profiling run"
    )
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = setting(
        None,
        "share of its GPU's memory that each rank takes in all; none: 0.9; no effect on CPUs or with kv_cache_memory",
    )
    kv_cache_dtype: CacheDtypeName = setting(
        "auto",
        "number format; fp8, fp8_e4m3: 8-bit floats with a scale for each token and head, in about half the "
        "memory of bfloat16; auto: dtype",
    )
    enable_prefix_caching: bool = setting(
        True, "keep the blocks of finished requests, for prompts that begin with the same tokens"
    )
    num_saved_states: Annotated[int, msgspec.Meta(ge=0)] | None = setting(
        None,
        "for models with recurrent states: saved states, from which prompts with the same prefix start; none:"
        " max_num_seqs",
    )
    kv_host_memory: int | str = setting(
        0,
        "store behind the KV cache of each rank, in the host's memory, like 4GiB: evicted blocks come back "
        "from it; 0: none",
    )
    kv_file: str | None = setting(None, "folder for that store: it is then a file without a name")
    kv_folder: str | None = setting(
        None,
        "folder of blocks that other engines share and that outlives this one, instead of kv_host_memory; "
        "only this user may write there",
    )
    kv_folder_size: int | str = setting("16GiB", "most bytes of each rank in kv_folder, like 16GiB")
    kv_transfer_address: str | None = setting(
        None,
        "exchange blocks of prompts with other engines: address, interface or subnet on which the ranks "
        "listen, like 127.0.0.1 or eth1, or with the port of the first rank, like 10.0.0.1:7000",
    )
    kv_transfer_key_file: str | None = setting(
        None, "file with a key that these engines share, needed on several machines"
    )
    kv_transfer_backend: Literal["tcp", "nixl"] = setting(
        "tcp", "nixl: blocks travel by NIXL (InfiniBand, NVLink, shared memory), else tcp"
    )
    kv_transfer_timeout: PositiveInt = setting(60, "seconds for which blocks are kept until another engine reads them")


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The method of speculative decoding. Names are vLLM's.

    Methods: ngram, prompt lookup in the tokens of the request; mtp, the checkpoint's multi-token prediction layer.
    """

    method: Literal["ngram", "mtp"]
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=64)]  # maximum draft tokens per request and step
    # The maximum and minimum length of the n-gram whose earlier occurrence is looked up.
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Scheduling"""

    max_num_seqs: PositiveInt | None = setting(
        None, "most requests that run in one step; none: 64 on a CPU, 256 on a GPU"
    )
    max_num_batched_tokens: PositiveInt | None = setting(
        None,
        "most tokens computed in one step; none: 2048 on a CPU, 8192 on a GPU, or up to 8192 with experts on disk, as "
        "memory allows",
    )
    max_prefill_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = setting(
        512,
        "with several replicas: most prompt tokens of each in a step while any of them decodes; 0: "
        "max_num_batched_tokens",
    )
    max_queued_requests: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = setting(
        8192, "most requests beyond those that can run at once; further ones are refused"
    )
    async_scheduling: bool = setting(
        True,
        "plan the next step while one runs; never with several pipeline stages",
    )
    max_concurrent_batches: PositiveInt | None = setting(
        None,
        "most steps in flight at once; none: one for each pipeline stage; with one stage, 2 with async scheduling",
    )
    expert_turn_wait: Annotated[float, msgspec.Meta(ge=0, le=3600)] = setting(
        5.0,
        "with expert_memory: most seconds that a request waits for its next token while others decode, because fewer "
        "at once find more experts in memory; turns begin only where they are faster; 0: all decode at once",
    )
    speculative_config: SpeculativeConfig | None = setting(
        None,
        'such as {"method": "ngram", "num_speculative_tokens": 4}; ngram: draft what followed an earlier '
        "occurrence of the last tokens; mtp: draft with the checkpoint's multi-token prediction layer",
    )
    debug_rank_state: bool = setting(
        False, "compare the state of every rank with the scheduler's after each step; slow"
    )
    enforce_eager: bool = setting(
        False,
        "run every step eagerly; otherwise decode steps are captured as CPU graphs or CUDA graphs and replayed",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """Parallelism"""

    tensor_parallel_size: PositiveInt = setting(1, "ranks that share the attention heads of one replica")
    data_parallel_size: PositiveInt = setting(1, "replicas that run in lockstep")
    pipeline_parallel_size: PositiveInt = setting(1, "stages that the layers of one replica are divided into")
    pipeline_layers: list[PositiveInt] | None = setting(
        None, "number of layers of each stage, such as 10,12,12; none: even shares"
    )
    executor: Literal["auto", "uniproc", "mp", "ray"] = setting(
        "auto",
        "where ranks run; uniproc: in this process; mp: in processes on this host; ray: on a Ray cluster; "
        "auto: one rank uniproc, or mp if it may restart; several ranks ray inside a Ray cluster or if this "
        "host has too few cores, else mp",
    )
    ray_compiled_graph: bool = setting(True, "with Ray: send steps through a compiled graph instead of actor calls")
    network_interface: str | None = setting(
        None, "with Ray: interface (eth1) or subnet (10.1.0.0/16); none: the addresses that Ray uses"
    )
    nnodes: PositiveInt = setting(1, "hosts without Ray, which have the same number of ranks")
    node_rank: Annotated[int, msgspec.Meta(ge=0)] = setting(
        0, "number of this host; 0 has the engine, and all others run ranks for it"
    )
    master_addr: str | None = setting(None, "with nnodes: HOST or HOST:PORT where the host with node_rank=0 listens")
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = setting(29501, "port, if master_addr names none")
    cluster_key_file: str | None = setting(None, "with nnodes: file with a key that all hosts share")
    expert_parallel: Literal["auto"] | bool = setting(
        "auto",
        "true: experts over all ranks of all replicas; false: each rank of a single replica holds a slice of "
        "every expert; auto: slices, if a cost formula finds them faster",
    )
    dispatcher: Literal["auto", DispatcherName] = setting(
        "auto",
        "how tokens reach experts; local: one rank; allgather: every rank gets every token; all_to_all: every"
        " rank gets the tokens of its experts; shared_memory: ranks of one host read them where they are; "
        "deepep: all_to_all between GPUs, by DeepEP; auto: shared_memory on CPUs, deepep on GPUs, else "
        "all_to_all",
    )
    deepep_low_latency_tokens: Annotated[int, msgspec.Meta(ge=0, le=8192)] = setting(
        128, "with DeepEP: most tokens per rank of a step with its low-latency kernels; 0: none"
    )
    deepep_api: Literal["auto", DeepEPApi] = setting(
        "auto",
        "elastic: DeepEP's ElasticBuffer, on NCCL; legacy: Buffer, on NVSHMEM; auto: elastic where the package has it",
    )
    overlap_decode_tokens: PositiveInt | None = setting(
        None,
        "two-batch overlap: run steps that only decode as two halves if a replica has at least this many "
        "tokens; none: never",
    )
    overlap_prefill_tokens: PositiveInt | None = setting(None, "the same for steps with prompts; none: never")
    deepep_float8: bool = setting(False, "with DeepEP: dispatch activations as fp8")
    num_redundant_experts: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = setting(
        0, "slots for further copies of experts in each layer, over all ranks together"
    )
    expert_loads: str | None = setting(
        None,
        'JSON file {"loads": [[...], ...]} or .jsonl of expert_load_file; experts are placed to balance the '
        "ranks, and the most loaded ones get copies; none: experts in order",
    )
    rebalance: str = setting(
        "off",
        "auto: move experts between ranks while serving; off: never; else a file of LLM.save_placement",
    )
    rebalance_horizon: PositiveInt = setting(
        10000, "with rebalance=auto: steps within which a move must save more time than it costs"
    )
    num_threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = setting(
        None, "CPU threads of each rank; none: its share of the cores; on one host, at most OMP_NUM_THREADS"
    )
    numa_binding: bool = setting(True, "bind the threads and the memory of each rank to a NUMA node")
    collective_timeout: Annotated[int, msgspec.Meta(ge=5, le=86400)] = (
        setting(  # well above the second that an idle replica sleeps
            60, "seconds that a rank waits for the others in one collective"
        )
    )
    detect_hangs: bool = setting(
        True, "end ranks that are stopped (4 s), or hang while others wait for them (3 to 8 s); off: for debuggers"
    )
    load_timeout: PositiveInt = setting(3600, "seconds within which all ranks must have loaded the model")
    step_timeout: PositiveInt = setting(
        600,
        "seconds after which a step without a result is a failure; with several ranks more than collective_timeout",
    )
    weight_update_timeout: PositiveInt = setting(
        300, "with rl: seconds without a call after which an update of the weights is cancelled"
    )
    on_failure: Literal["auto", "end", "restart", "recover", "shrink"] = setting(
        "auto",
        "when a rank has failed; end: all requests end with an error; restart: ranks are started again, and "
        "requests continue; recover: the same, but ranks that have not failed keep their weights if possible; shrink: "
        "replicas that have lost ranks are left out if possible; auto: recover for several ranks on this host, end if "
        "the rank runs in this process, else restart",
    )
    debug_collectives: bool = setting(False, "check before each collective that all ranks run the same one")

    @property
    def num_ranks(self) -> int:
        return self.num_expert_ranks * self.pipeline_parallel_size

    @property
    def num_expert_ranks(self) -> int:
        """Number of ranks that share the experts of a layer: all ranks of one stage, in all replicas."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def has_overlap(self) -> bool:
        """True if some steps run with two-batch overlap."""
        return (self.overlap_decode_tokens, self.overlap_prefill_tokens) != (None, None)

    @property
    def changed_deepep_setting(self) -> str | None:
        """The first DeepEP setting that differs from its default, as `name=value`; None if there is none."""
        defaults = ParallelSettings()
        for name in ("deepep_low_latency_tokens", "deepep_api", "deepep_float8"):
            if (value := getattr(self, name)) != getattr(defaults, name):
                return f"{name}={shown(value)}"
        return None


class ProfilerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The traces of `LLM.start_profile`. Names are vLLM's."""

    torch_profiler_dir: str  # folder of the traces
    profiler: Literal["torch"] = "torch"


@dataclass(frozen=True, kw_only=True)
class TelemetrySettings:
    """Telemetry"""

    expert_load_window: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = setting(
        None,
        f"steps between reports of expert load; none: {DEFAULT_LOAD_WINDOW} with expert_load_file, metrics_port or "
        "rebalance=auto, else only on request",
    )
    expert_load_file: str | None = setting(
        None, "file that gets a line of JSON per window: tokens of each expert and rank"
    )
    metrics_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = setting(
        None, "port on the loopback interface for Prometheus; none: no metrics"
    )
    profiler_config: ProfilerConfig | None = setting(
        None,
        'folder for the traces of LLM.start_profile: {"profiler": "torch", "torch_profiler_dir": "traces"}',
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings as a user gives them, by group."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)

    @classmethod
    def groups(cls) -> dict[str, type]:
        """Return the groups of settings by field name."""
        return get_type_hints(cls)
