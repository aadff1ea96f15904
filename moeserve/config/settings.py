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
ProductChoice = ProductName | Literal["measured"]


def setting(default: Any, help: str) -> Any:
    """Return a dataclass field with its default and the text that `--help` shows."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Model"""

    model: str | None = setting(
        None,
        "checkpoint folder in Hugging Face layout, a GGUF file, or OWNER/NAME in a hub (OWNER/NAME:FILE for a GGUF "
        "file, where FILE may be a quantisation like Q4_K_M); none: the default model, made at its first use",
    )
    tokenizer: str | None = setting(None, "tokenizer folder, or OWNER/NAME in a hub; none: the checkpoint")
    revision: str | None = setting(None, "branch, tag or commit of a model in a hub; none: the main branch")
    tokenizer_revision: str | None = setting(
        None, "branch, tag or commit of a tokenizer in a hub; none: the main branch, or revision without tokenizer"
    )
    download_dir: str | None = setting(
        None, "folder where files from a hub are kept; none: HF_HUB_CACHE, or ~/.cache/huggingface/hub"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float", "half"] = setting(
        "auto",
        "number format of weights, activations and, with kv_cache_dtype=auto, the KV cache; auto: the checkpoint's; "
        "float and half: as in torch",
    )
    quantization: QuantizationName | StoredFormatName | None = setting(
        None,
        "quantise projections and experts while loading; on a CPU: int8 (one scale per output) or int4 (a scale and "
        "a zero point per 32 weights); on a GPU: fp8 (one scale per 128 x 128 weights); int4 and fp8 are used "
        "unchanged where the checkpoint has them; mxfp4: experts stay as a checkpoint in MXFP4 (gpt-oss, DeepSeek-V4) "
        "stores them, as they do by default in bfloat16; other names: the format of the checkpoint, as without the "
        "setting",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "device of all tensors; auto: cpu")
    attention_backend: Literal["auto", AttentionName] = setting(
        "auto",
        "attention kernels on a GPU; triton: moeserve's own; flashinfer: that library for the steps "
        "that it supports, triton for others; auto: the fastest when measured on this GPU, else triton",
    )
    product_backend: Literal["auto", ProductName] = setting(
        "auto",
        "products of 8-bit blocks on a GPU, with quantization=fp8; triton: moeserve's own; deep_gemm: DeepGEMM for the "
        "shapes that it supports, triton for others; auto: the fastest when measured on this GPU, "
        "else triton",
    )
    batch_invariant: bool = setting(
        False,
        "results depend on the request alone, to the bit, not on the batch or the layout; settings that exclude it are "
        "errors; slower on a GPU, no difference on a CPU, which does so wherever it can",
    )
    hf_overrides: dict[str, Any] | None = setting(
        None,
        'changes to config.json before it is read, such as {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}; '
        "objects are merged; none: no changes",
    )
    load_format: Literal["auto", "dummy"] = setting("auto", "dummy: random weights; only config.json is read")
    ignore_unused_weights: bool = setting(
        False,
        "load a checkpoint although it stores tensors that the model does not read and that could change its output; "
        "otherwise they are an error",
    )
    model_impl: Literal["auto", ModelImplName] = setting(
        "auto",
        "transformers: run the model through transformers' own code, with moeserve's attention and expert parallelism, "
        "for architectures that moeserve does not implement; slower; auto: moeserve's own code",
    )
    packed_cache: int | str = setting(
        "16GiB",
        "size of the cache of packed weights on disk, which makes the next start fast, as bytes or like 16GiB; the "
        "least recently used weights are evicted first; 0: no cache",
    )
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = setting(
        0, "seed of dummy weights, and of sampling for requests without a seed; none: a random one, which is logged"
    )
    max_model_len: int | str | None = setting(
        None,
        "most tokens of one request, prompt and output, also as 32k (32000) or 32K (32768); none, -1, auto: as many as "
        "the model and the KV cache allow",
    )
    generation_config: Literal["auto", "vllm"] = setting(
        "auto",
        "default sampling parameters; auto: those of the checkpoint's generation_config.json; vllm: those of "
        "SamplingParams",
    )
    override_generation_config: dict[str, Any] | None = setting(
        None, 'sampling parameters that replace these defaults, such as {"temperature": 0.5}'
    )


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """KV cache"""

    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = setting(
        None, "tokens per block of the KV cache; none: 16, or 128 for DeepSeek-V4, which keeps more for each block"
    )
    kv_cache_memory: int | str | None = setting(
        None, "size of the KV cache on each rank, as bytes or like 512MiB; none: measured by a profiling run"
    )
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = setting(
        None,
        "share of its GPU's memory that each rank takes in all, from which a profiling run sizes the KV cache; none: "
        "0.9; no effect on CPUs or with kv_cache_memory",
    )
    kv_cache_dtype: CacheDtypeName = setting(
        "auto",
        "number format of the KV cache; fp8, fp8_e4m3: 8-bit floats (E4M3) with a scale for each token and head, in "
        "about half the memory of bfloat16; auto: dtype",
    )
    enable_prefix_caching: bool = setting(
        True, "keep the blocks of finished requests, for prompts that begin with the same tokens"
    )
    num_saved_states: Annotated[int, msgspec.Meta(ge=0)] | None = setting(
        None,
        "for models with recurrent states: number of saved states, from which prompts with the same prefix start; "
        "none: as many as max_num_seqs",
    )
    kv_host_memory: int | str = setting(
        0,
        "size of a store behind the KV cache of each rank, in the host's memory, as bytes or like 4GiB: blocks that "
        "the cache has lost come back from it instead of being computed again; 0: none",
    )
    kv_file: str | None = setting(
        None, "folder for that store: it is then a file without a name, on a disk that is faster than computing"
    )
    kv_folder: str | None = setting(
        None,
        "folder of KV cache blocks that other engines share and that outlives this one, instead of kv_host_memory; "
        "only this user may write there",
    )
    kv_folder_size: int | str = setting(
        "16GiB", "most bytes that the blocks of each rank take in kv_folder, as bytes or like 16GiB"
    )
    kv_transfer_address: str | None = setting(
        None,
        "let other engines read KV cache blocks of prompts that they ask for, and read theirs: address, interface or "
        "subnet on which the ranks listen, like 127.0.0.1 or eth1, or with the port of the first rank, like "
        "10.0.0.1:7000",
    )
    kv_transfer_key_file: str | None = setting(
        None, "file with a key that these engines share, needed if they run on several machines"
    )
    kv_transfer_backend: Literal["tcp", "nixl"] = setting(
        "tcp", "how blocks travel between engines; nixl: by NIXL (InfiniBand, NVLink, shared memory), else tcp"
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
        None, "most tokens computed in one step; none: 2048 on a CPU, 8192 on a GPU"
    )
    max_prefill_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = setting(
        512,
        "with several replicas: most prompt tokens that each computes in a step while any of them decodes, and so the "
        "longest that a token of one waits for prompts of another; 0: max_num_batched_tokens",
    )
    max_queued_requests: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = setting(
        8192, "most requests in flight beyond those that can run at once; further ones are refused"
    )
    async_scheduling: bool = setting(
        True,
        "plan the next step while one runs; otherwise only when the tokens of the last one are known, as is always so "
        "with several pipeline stages",
    )
    max_concurrent_batches: PositiveInt | None = setting(
        None,
        "most steps in flight at once, the running ones included; none: one for each pipeline stage; with one stage, 2 "
        "with async scheduling",
    )
    speculative_config: SpeculativeConfig | None = setting(
        None,
        'speculative decoding, such as {"method": "ngram", "num_speculative_tokens": 4}; ngram: draft the tokens that '
        "followed an earlier occurrence of the last tokens in the request; mtp: draft with the checkpoint's "
        "multi-token prediction layer; none: no speculative decoding",
    )
    debug_rank_state: bool = setting(
        False, "compare the requests in every rank's table with the scheduler after each step, for debugging; slow"
    )
    enforce_eager: bool = setting(
        False,
        "run every step eagerly; otherwise decode steps are captured once as CPU graphs or CUDA graphs and replayed",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """Parallelism"""

    tensor_parallel_size: PositiveInt = setting(1, "ranks that share the attention heads of one replica")
    data_parallel_size: PositiveInt = setting(1, "replicas that run in lockstep")
    pipeline_parallel_size: PositiveInt = setting(
        1, "stages that the layers of one replica are divided into, each on ranks of its own"
    )
    pipeline_layers: list[PositiveInt] | None = setting(
        None, "number of layers of each stage, such as 10,12,12; none: even shares"
    )
    executor: Literal["auto", "uniproc", "mp", "ray"] = setting(
        "auto",
        "where ranks run; uniproc: in this process; mp: in processes on this host; ray: in actors of a Ray cluster; "
        "auto: one rank uniproc, or mp if it may restart; several ranks ray inside a Ray cluster or if this host has "
        "too few cores, else mp",
    )
    ray_compiled_graph: bool = setting(True, "with Ray: send steps through a compiled graph instead of actor calls")
    network_interface: str | None = setting(
        None, "with Ray: network interface by name (eth1) or subnet (10.1.0.0/16); none: the addresses that Ray uses"
    )
    expert_parallel: Literal["auto"] | bool = setting(
        "auto",
        "true: expert parallelism over all ranks of all replicas; false: tensor-parallel experts (each rank of a "
        "single replica holds a slice of every expert); auto: slices, if a cost formula finds them faster",
    )
    dispatcher: Literal["auto", DispatcherName] = setting(
        "auto",
        "how tokens are dispatched to experts; local: one rank, no exchange; allgather: every rank gets every token; "
        "all_to_all: every rank gets the tokens of its experts; shared_memory: ranks of one host read them where they "
        "are; deepep: all_to_all between GPUs, by DeepEP; auto: shared_memory on CPUs, deepep on GPUs, or all_to_all "
        "where these cannot run",
    )
    deepep_low_latency_tokens: Annotated[int, msgspec.Meta(ge=0, le=8192)] = setting(
        128, "with DeepEP: most tokens per rank of a step that uses its low-latency kernels; 0: none"
    )
    deepep_api: Literal["auto", DeepEPApi] = setting(
        "auto",
        "DeepEP's API; elastic: ElasticBuffer, on NCCL; legacy: Buffer, on NVSHMEM, whose low-latency kernels take no "
        "multiprocessors while rows travel; auto: elastic where the package has it",
    )
    overlap_decode_tokens: PositiveInt | None = setting(
        None,
        "two-batch overlap: run steps that only decode as two halves, of which one computes while the tokens of the "
        "other travel to experts, if a replica has at least this many tokens; none: never",
    )
    overlap_prefill_tokens: PositiveInt | None = setting(None, "the same for steps with prompts; none: never")
    deepep_float8: bool = setting(False, "with DeepEP: dispatch activations as fp8")
    num_redundant_experts: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = setting(
        0, "slots for redundant experts (further copies of an expert) in each layer, over all ranks together"
    )
    expert_loads: str | None = setting(
        None,
        'JSON file {"loads": [[...], ...]} or .jsonl of expert_load_file with the tokens of each expert of each layer; '
        "experts are placed to balance the ranks, and the most loaded ones get copies; none: experts in order",
    )
    rebalance: str = setting(
        "off",
        "auto: move experts between ranks while serving, as loads change; off: never; else a placement file, as "
        "LLM.save_placement writes it",
    )
    rebalance_horizon: PositiveInt = setting(
        10000, "with rebalance=auto: steps within which a new placement must save more time than moving experts costs"
    )
    num_threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = setting(
        None, "CPU threads of each rank; none: the cores of this process divided by the ranks on this host"
    )
    numa_binding: bool = setting(
        True, "on hosts with several NUMA nodes: bind the threads and the memory of each rank to a node"
    )
    collective_timeout: Annotated[int, msgspec.Meta(ge=5, le=86400)] = (
        setting(  # well above the second that an idle replica sleeps
            300, "seconds that a rank waits for the others in one collective before it reports an error"
        )
    )
    load_timeout: PositiveInt = setting(3600, "seconds within which all ranks must have loaded the model")
    step_timeout: PositiveInt = setting(
        600,
        "seconds after which a step without a result is a failure of the engine; with several ranks more than "
        "collective_timeout",
    )
    on_failure: Literal["auto", "end", "restart", "shrink"] = setting(
        "auto",
        "what follows when a rank has failed; end: all requests end with an error; restart: the ranks are started "
        "again, and requests continue where they were; shrink: the same with one replica fewer, if there are several; "
        "auto: restart with ray, else end",
    )
    debug_collectives: bool = setting(
        False, "check before each collective that all ranks are about to run the same one"
    )

    @property
    def num_ranks(self) -> int:
        return self.num_expert_ranks * self.pipeline_parallel_size

    @property
    def num_expert_ranks(self) -> int:
        """Number of ranks that share the experts of a layer: those of one stage in all replicas."""
        return self.tensor_parallel_size * self.data_parallel_size

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
        None, "file that gets a line of JSON per window: the tokens of each expert and rank of each layer"
    )
    metrics_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = setting(
        None, "port on the loopback interface that serves metrics to Prometheus; none: no metrics"
    )
    profiler_config: ProfilerConfig | None = setting(
        None,
        'folder for the traces of LLM.start_profile, as {"profiler": "torch", "torch_profiler_dir": "traces"}; none: '
        "no traces",
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
