"""The settings as keyword arguments, for type checkers and editors.

Written by `tests/setting_arguments.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

import torch

from moeserve.config.settings import ProfilerConfig, SpeculativeConfig


class SettingArguments(TypedDict, total=False):
    """Keyword arguments of `LLM` and `AsyncLLM`."""

    # Model
    tokenizer: PathLike[str] | str | None
    """folder, or OWNER/NAME in a hub; none: the checkpoint's (a text or None; default: None)."""
    revision: PathLike[str] | str | None
    """branch, tag or commit in a hub; none: the main branch (a text or None; default: None)."""
    tokenizer_revision: PathLike[str] | str | None
    """the same of a tokenizer; none: the main branch, or revision without tokenizer (a text or None; default:
    None)."""
    download_dir: PathLike[str] | str | None
    """folder of files from a hub; none: HF_HUB_CACHE, or ~/.cache/huggingface/hub (a text or None; default:
    None)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float", "half"] | torch.dtype
    """number format of weights, activations and, with kv_cache_dtype=auto, the KV cache; auto: the checkpoint's
    (one of 'auto', 'float32', 'bfloat16', 'float16', 'float', 'half'; default: 'auto')."""
    quantization: (
        Literal["int8", "int4", "fp8", "mxfp4"]
        | Literal["awq", "gptq", "auto-round", "compressed-tensors", "fbgemm_fp8", "modelopt", "gguf"]
        | None
    )
    """quantise projections and experts while loading; on a CPU: int8 (a scale per output) or int4 (Q4_K, and Q5_K,
    Q6_K or int8 where errors matter more); on a GPU: fp8 (a scale per 128 x 128 weights); codes of a checkpoint in
    int4 or fp8 are kept; mxfp4: experts as a checkpoint in MXFP4 stores them, which is the default in bfloat16;
    other names: the format of the checkpoint, as without the setting (one of 'int8', 'int4', 'fp8', 'mxfp4' or one
    of 'awq', 'gptq', 'auto-round', 'compressed-tensors', 'fbgemm_fp8', 'modelopt', 'gguf' or None; default:
    None)."""
    device: Literal["auto", "cpu", "cuda"]
    """device of all tensors; auto: cpu (one of 'auto', 'cpu', 'cuda'; default: 'auto')."""
    attention_backend: Literal["auto", "triton", "flashinfer"]
    """attention on a GPU; triton: moeserve's kernels; flashinfer: that library where it can; auto: the faster one
    in measurements on this GPU, else triton (one of 'auto', 'triton', 'flashinfer'; default: 'auto')."""
    product_backend: Literal["auto", "triton", "deep_gemm"]
    """products of 8-bit blocks on a GPU, with quantization=fp8; triton: moeserve's kernels; deep_gemm: DeepGEMM
    where it can; auto: the faster one in measurements on this GPU, else triton (one of 'auto', 'triton',
    'deep_gemm'; default: 'auto')."""
    batch_invariant: bool
    """results depend on the request alone, to the bit; settings that exclude it are errors; slower on a GPU; a CPU
    does so wherever it can (True or False; default: False)."""
    hf_overrides: Mapping[str, Any] | None
    """changes to config.json, such as {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}; objects are merged (a
    dict (in JSON, an object) or None; default: None)."""
    load_format: Literal["auto", "dummy"]
    """dummy: random weights; only config.json is read (one of 'auto', 'dummy'; default: 'auto')."""
    ignore_unused_weights: bool
    """load a checkpoint with tensors that the model does not read and that could change its output; otherwise an
    error (True or False; default: False)."""
    model_impl: Literal["auto", "moeserve", "transformers"]
    """transformers: run a model without a family through transformers' code; slower; auto: moeserve's own code (one
    of 'auto', 'moeserve', 'transformers'; default: 'auto')."""
    packed_cache: int | str
    """size of the cache of packed weights on disk, which makes the next start fast, like 16GiB; 0: no cache (an
    integer or a text; default: '16GiB')."""
    expert_device: Literal["auto", "cpu"]
    """cpu: with device='cuda' and one GPU, the host keeps and computes the routed experts, in int8 or int4 if
    quantization says so, and the GPU all else; auto: experts are on the device of the model (one of 'auto', 'cpu';
    default: 'auto')."""
    num_cpu_layers: int | None
    """with expert_device='cpu': the number of the model's first layers whose experts are on the host; the GPU keeps
    those of the others; none: all layers (an integer from 1 to 2**31 - 1 or None; default: None)."""
    expert_memory: int | str | None
    """memory of each rank for routed experts, like 8GiB or 25%, on CPUs; those that do not fit are read from a copy
    on disk when tokens need them; auto: what is free; none: all experts must fit in memory (an integer or a text or
    None; default: None)."""
    expert_store: PathLike[str] | str | None
    """folder of that copy, on a fast disk; none: experts in the folder of moeserve's cache (a text or None;
    default: None)."""
    seed: int | None
    """seed of dummy weights and of requests without a seed; none: a random one, which is logged (an integer from 0
    to 2**63 - 1 or None; default: 0)."""
    max_model_len: int | str | None
    """most tokens of one request, prompt and output, also as 32k (32000) or 32K (32768); none, -1, auto: what the
    model and the KV cache allow (an integer or a text or None; default: None)."""
    generation_config: Literal["auto", "vllm"]
    """default sampling parameters; auto: those of generation_config.json; vllm: those of SamplingParams (one of
    'auto', 'vllm'; default: 'auto')."""
    override_generation_config: Mapping[str, Any] | None
    """sampling parameters that replace these defaults, such as {"temperature": 0.5} (a dict (in JSON, an object) or
    None; default: None)."""
    rl: bool
    """let a trainer update the weights (docs/rl.md); moeserve serve then has trainers' routes, which need the
    administrator's key, or no key with --rl-without-key (True or False; default: False)."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
    """what logprobs and prompt_logprobs return; raw: the model's; processed: those with which a token is drawn,
    after bias, penalties, temperature, min_p, top_k and top_p (for a prompt: after the temperature only); logits:
    not normalised (one of 'raw_logprobs', 'processed_logprobs', 'raw_logits', 'processed_logits'; default:
    'raw_logprobs')."""
    enable_return_routed_experts: bool
    """outputs have the experts of their tokens, and LLM.score may be given them (docs/rl.md); on CPUs (True or
    False; default: False)."""
    # KV cache
    block_size: int | None
    """tokens per block; none: 16, or 128 for DeepSeek-V4 (an integer from 1 to 4096 or None; default: None)."""
    kv_cache_memory: int | str | None
    """size on each rank, like 512MiB; none: measured by a profiling run (an integer or a text or None; default:
    None)."""
    gpu_memory_utilization: float | None
    """share of its GPU's memory that each rank takes in all; none: 0.9; no effect on CPUs or with kv_cache_memory
    (a number above 0 to 1 or None; default: None)."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"]
    """number format; fp8, fp8_e4m3: 8-bit floats with a scale for each token and head, in about half the memory of
    bfloat16; auto: dtype (one of 'auto', 'fp8', 'fp8_e4m3'; default: 'auto')."""
    enable_prefix_caching: bool
    """keep the blocks of finished requests, for prompts that begin with the same tokens (True or False; default:
    True)."""
    num_saved_states: int | None
    """for models with recurrent states: saved states, from which prompts with the same prefix start; none:
    max_num_seqs (an integer from 0 or None; default: None)."""
    kv_host_memory: int | str
    """store behind the KV cache of each rank, in the host's memory, like 4GiB: evicted blocks come back from it; 0:
    none (an integer or a text; default: 0)."""
    kv_file: PathLike[str] | str | None
    """folder for that store: it is then a file without a name (a text or None; default: None)."""
    kv_folder: PathLike[str] | str | None
    """folder of blocks that other engines share and that outlives this one, instead of kv_host_memory; only this
    user may write there (a text or None; default: None)."""
    kv_folder_size: int | str
    """most bytes of each rank in kv_folder, like 16GiB (an integer or a text; default: '16GiB')."""
    kv_transfer_address: PathLike[str] | str | None
    """exchange blocks of prompts with other engines: address, interface or subnet on which the ranks listen, like
    127.0.0.1 or eth1, or with the port of the first rank, like 10.0.0.1:7000 (a text or None; default: None)."""
    kv_transfer_key_file: PathLike[str] | str | None
    """file with a key that these engines share, needed on several machines (a text or None; default: None)."""
    kv_transfer_backend: Literal["tcp", "nixl"]
    """nixl: blocks travel by NIXL (InfiniBand, NVLink, shared memory), else tcp (one of 'tcp', 'nixl'; default:
    'tcp')."""
    kv_transfer_timeout: int
    """seconds for which blocks are kept until another engine reads them (an integer from 1 to 2**31 - 1; default:
    60)."""
    # Scheduling
    max_num_seqs: int | None
    """most requests that run in one step; none: 64 on a CPU, 256 on a GPU (an integer from 1 to 2**31 - 1 or None;
    default: None)."""
    max_num_batched_tokens: int | None
    """most tokens computed in one step; none: 2048 on a CPU, 8192 on a GPU, or up to 8192 with experts on disk, as
    memory allows (an integer from 1 to 2**31 - 1 or None; default: None)."""
    max_prefill_tokens: int
    """with several replicas: most prompt tokens of each in a step while any of them decodes; 0:
    max_num_batched_tokens (an integer from 0 to 2**31 - 1; default: 512)."""
    max_queued_requests: int
    """most requests beyond those that can run at once; further ones are refused (an integer from 0 to 2**31 - 1;
    default: 8192)."""
    async_scheduling: bool
    """plan the next step while one runs; never with several pipeline stages (True or False; default: True)."""
    max_concurrent_batches: int | None
    """most steps in flight at once; none: one for each pipeline stage; with one stage, 2 with async scheduling (an
    integer from 1 to 2**31 - 1 or None; default: None)."""
    expert_turn_wait: float
    """with expert_memory: most seconds that a request waits for its next token while others decode, because fewer
    at once find more experts in memory; turns begin only where they are faster; 0: all decode at once (a number
    from 0 to 3600; default: 5.0)."""
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None
    """such as {"method": "ngram", "num_speculative_tokens": 4}; ngram: draft what followed an earlier occurrence of
    the last tokens; mtp: draft with the checkpoint's multi-token prediction layer (a dict (in JSON, an object) or
    None; default: None)."""
    debug_rank_state: bool
    """compare the state of every rank with the scheduler's after each step; slow (True or False; default:
    False)."""
    enforce_eager: bool
    """run every step eagerly; otherwise decode steps are captured as CPU graphs or CUDA graphs and replayed (True
    or False; default: False)."""
    # Parallelism
    tensor_parallel_size: int
    """ranks that share the attention heads of one replica (an integer from 1 to 2**31 - 1; default: 1)."""
    data_parallel_size: int
    """replicas that run in lockstep (an integer from 1 to 2**31 - 1; default: 1)."""
    pipeline_parallel_size: int
    """stages that the layers of one replica are divided into (an integer from 1 to 2**31 - 1; default: 1)."""
    pipeline_layers: Sequence[int] | None
    """number of layers of each stage, such as 10,12,12; none: even shares (a list, each entry an integer from 1 to
    2**31 - 1 or None; default: None)."""
    executor: Literal["auto", "uniproc", "mp", "ray"]
    """where ranks run; uniproc: in this process; mp: in processes on this host; ray: on a Ray cluster; auto: one
    rank uniproc, or mp if it may restart; several ranks ray inside a Ray cluster or if this host has too few cores,
    else mp (one of 'auto', 'uniproc', 'mp', 'ray'; default: 'auto')."""
    ray_compiled_graph: bool
    """with Ray: send steps through a compiled graph instead of actor calls (True or False; default: True)."""
    network_interface: PathLike[str] | str | None
    """with Ray: interface (eth1) or subnet (10.1.0.0/16); none: the addresses that Ray uses (a text or None;
    default: None)."""
    nnodes: int
    """hosts without Ray, which have the same number of ranks (an integer from 1 to 2**31 - 1; default: 1)."""
    node_rank: int
    """number of this host; 0 has the engine, and all others run ranks for it (an integer from 0; default: 0)."""
    master_addr: PathLike[str] | str | None
    """with nnodes: HOST or HOST:PORT where the host with node_rank=0 listens (a text or None; default: None)."""
    master_port: int
    """port, if master_addr names none (an integer from 1 to 65535; default: 29501)."""
    cluster_key_file: PathLike[str] | str | None
    """with nnodes: file with a key that all hosts share (a text or None; default: None)."""
    expert_parallel: Literal["auto"] | bool
    """true: experts over all ranks of all replicas; false: each rank of a single replica holds a slice of every
    expert; auto: slices, if a cost formula finds them faster (one of 'auto' or True or False; default: 'auto')."""
    dispatcher: Literal["auto", "local", "allgather", "all_to_all", "shared_memory", "deepep"]
    """how tokens reach experts; local: one rank; allgather: every rank gets every token; all_to_all: every rank
    gets the tokens of its experts; shared_memory: ranks of one host read them where they are; deepep: all_to_all
    between GPUs, by DeepEP; auto: shared_memory on CPUs, deepep on GPUs, else all_to_all (one of 'auto', 'local',
    'allgather', 'all_to_all', 'shared_memory', 'deepep'; default: 'auto')."""
    deepep_low_latency_tokens: int
    """with DeepEP: most tokens per rank of a step with its low-latency kernels; 0: none (an integer from 0 to 8192;
    default: 128)."""
    deepep_api: Literal["auto", "legacy", "elastic"]
    """elastic: DeepEP's ElasticBuffer, on NCCL; legacy: Buffer, on NVSHMEM; auto: elastic where the package has it
    (one of 'auto', 'legacy', 'elastic'; default: 'auto')."""
    overlap_decode_tokens: int | None
    """two-batch overlap: run steps that only decode as two halves if a replica has at least this many tokens; none:
    never (an integer from 1 to 2**31 - 1 or None; default: None)."""
    overlap_prefill_tokens: int | None
    """the same for steps with prompts; none: never (an integer from 1 to 2**31 - 1 or None; default: None)."""
    deepep_float8: bool
    """with DeepEP: dispatch activations as fp8 (True or False; default: False)."""
    num_redundant_experts: int
    """slots for further copies of experts in each layer, over all ranks together (an integer from 0 to 1048576;
    default: 0)."""
    expert_loads: PathLike[str] | str | None
    """JSON file {"loads": [[...], ...]} or .jsonl of expert_load_file; experts are placed to balance the ranks, and
    the most loaded ones get copies; none: experts in order (a text or None; default: None)."""
    rebalance: PathLike[str] | str
    """auto: move experts between ranks while serving; off: never; else a file of LLM.save_placement (a text;
    default: 'off')."""
    rebalance_horizon: int
    """with rebalance=auto: steps within which a move must save more time than it costs (an integer from 1 to 2**31
    - 1; default: 10000)."""
    num_threads: int | None
    """CPU threads of each rank; none: its share of the cores; on one host, at most OMP_NUM_THREADS (an integer from
    1 to 1024 or None; default: None)."""
    numa_binding: bool
    """bind the threads and the memory of each rank to a NUMA node (True or False; default: True)."""
    collective_timeout: int
    """seconds that a rank waits for the others in one collective (an integer from 5 to 86400; default: 60)."""
    detect_hangs: bool
    """end ranks that are stopped (4 s), or hang while others wait for them (3 to 8 s); off: for debuggers (True or
    False; default: True)."""
    load_timeout: int
    """seconds within which all ranks must have loaded the model (an integer from 1 to 2**31 - 1; default: 3600)."""
    step_timeout: int
    """seconds after which a step without a result is a failure; with several ranks more than collective_timeout (an
    integer from 1 to 2**31 - 1; default: 600)."""
    weight_update_timeout: int
    """with rl: seconds without a call after which an update of the weights is cancelled (an integer from 1 to 2**31
    - 1; default: 300)."""
    on_failure: Literal["auto", "end", "restart", "recover", "shrink"]
    """when a rank has failed; end: all requests end with an error; restart: ranks are started again, and requests
    continue; recover: the same, but ranks that have not failed keep their weights if possible; shrink: replicas
    that have lost ranks are left out if possible; auto: recover for several ranks on this host, end if the rank
    runs in this process, else restart (one of 'auto', 'end', 'restart', 'recover', 'shrink'; default: 'auto')."""
    debug_collectives: bool
    """check before each collective that all ranks run the same one (True or False; default: False)."""
    # Telemetry
    expert_load_window: int | None
    """steps between reports of expert load; none: 256 with expert_load_file, metrics_port or rebalance=auto, else
    only on request (an integer from 1 to 2**31 - 1 or None; default: None)."""
    expert_load_file: PathLike[str] | str | None
    """file that gets a line of JSON per window: tokens of each expert and rank (a text or None; default: None)."""
    metrics_port: int | None
    """port on the loopback interface for Prometheus; none: no metrics (an integer from 1 to 65535 or None; default:
    None)."""
    profiler_config: ProfilerConfig | Mapping[str, Any] | None
    """folder for the traces of LLM.start_profile: {"profiler": "torch", "torch_profiler_dir": "traces"} (a dict (in
    JSON, an object) or None; default: None)."""
    # Names of vLLM, for scripts written for it
    distributed_executor_backend: Literal["uni", "mp", "ray"] | None
    """the same as executor (one of 'uni', 'mp', 'ray' or None; default: None)."""
    kv_cache_memory_bytes: int | None
    """the same as kv_cache_memory (an integer or None; default: None)."""
    swap_space: float | None
    """no effect: preempted requests are computed again (a number or None; default: 0)."""
    trust_remote_code: bool
    """must be off: code of a checkpoint is never run (True or False; default: False)."""
    enable_expert_parallel: bool | None
    """the same as expert_parallel, true or false (True or False or None; default: None)."""
    enable_chunked_prefill: bool | None
    """no effect: long prompts are always computed in chunks (True or False or None; default: True)."""
    enable_eplb: bool
    """no effect: experts are rebalanced with rebalance="auto" (True or False; default: False)."""
    all2all_backend: PathLike[str] | str | None
    """no effect: the exchange is chosen with dispatcher (a text or None; default: None)."""
    enable_dbo: bool
    """two-batch overlap, from the numbers of tokens in the next two settings (True or False; default: False)."""
    dbo_decode_token_threshold: int
    """with enable_dbo: the same as overlap_decode_tokens (an integer from 1 to 2**31 - 1; default: 32)."""
    dbo_prefill_token_threshold: int
    """with enable_dbo: the same as overlap_prefill_tokens (an integer from 1 to 2**31 - 1; default: 512)."""
    disable_log_stats: bool
    """no effect: only a server logs statistics; see log_stats_interval (True or False; default: True)."""
    # Settings of vLLM of which only values that change nothing are accepted
    additional_config: Any
    allowed_local_media_path: Any
    allowed_media_domains: Any
    async_scheduling_mode: Any
    calculate_kv_scales: Any
    chat_template: Any
    code_revision: Any
    compilation_config: Any
    config_format: Any
    convert: Any
    cpu_offload_gb: Any
    cuda_graph_sizes: Any
    cudagraph_capture_sizes: Any
    cudagraph_metrics: Any
    data_parallel_address: Any
    data_parallel_backend: Any
    data_parallel_external_lb: Any
    data_parallel_hybrid_lb: Any
    data_parallel_rank: Any
    data_parallel_rpc_port: Any
    data_parallel_size_local: Any
    data_parallel_start_rank: Any
    decode_context_parallel_size: Any
    default_mm_loras: Any
    disable_async_output_proc: Any
    disable_cascade_attn: Any
    disable_chunked_mm_input: Any
    disable_custom_all_reduce: Any
    disable_hybrid_kv_cache_manager: Any
    disable_log_requests: Any
    disable_mm_preprocessor_cache: Any
    disable_sliding_window: Any
    enable_flashinfer_autotune: Any
    enable_log_requests: Any
    enable_lora: Any
    enable_lora_bias: Any
    enable_mm_embeds: Any
    enable_prompt_embeds: Any
    enable_sleep_mode: Any
    enable_trace_replay: Any
    fail_on_environ_validation: Any
    fully_sharded_loras: Any
    guided_decoding_backend: Any
    hf_config_path: Any
    hf_token: Any
    ignore_patterns: Any
    interleave_mm_strings: Any
    io_processor_plugin: Any
    kv_cache_metrics: Any
    kv_events_config: Any
    kv_offloading_size: Any
    kv_transfer_config: Any
    language_model_only: Any
    limit_mm_per_prompt: Any
    log_level: Any
    logits_processors: Any
    long_prefill_token_threshold: Any
    lora_dtype: Any
    lora_extra_vocab_size: Any
    max_cpu_loras: Any
    max_cudagraph_capture_size: Any
    max_logprobs: Any
    max_long_partial_prefills: Any
    max_lora_rank: Any
    max_loras: Any
    max_num_partial_prefills: Any
    max_parallel_loading_workers: Any
    max_seq_len_to_capture: Any
    media_io_kwargs: Any
    mm_processor_cache_gb: Any
    mm_processor_kwargs: Any
    model_loader_extra_config: Any
    num_gpu_blocks_override: Any
    num_lookahead_slots: Any
    offload_backend: Any
    offload_group_size: Any
    optimization_level: Any
    otlp_traces_endpoint: Any
    override_pooler_config: Any
    performance_mode: Any
    pooler_config: Any
    prefill_context_parallel_size: Any
    prefix_caching_hash_algo: Any
    pt_load_map_location: Any
    reasoning_parser_plugin: Any
    rope_scaling: Any
    rope_theta: Any
    runner: Any
    scheduler_cls: Any
    scheduling_policy: Any
    served_model_name: Any
    shutdown_timeout: Any
    skip_mm_profiling: Any
    skip_tokenizer_init: Any
    stream_interval: Any
    structured_outputs_config: Any
    task: Any
    tokenizer_mode: Any
    use_tqdm_on_load: Any
    use_v2_block_manager: Any
    watermark: Any
    worker_cls: Any
    worker_extension_cls: Any
