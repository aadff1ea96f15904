"""Options of vLLM that do not exist here: values that change nothing are accepted, others refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moeserve.errors import RequestError, SettingsError, shown


@dataclass(frozen=True)
class VllmOption:
    """A setting, sampling parameter or argument of vLLM that moeserve does not have.

    Attributes:
        why: why other values than the harmless ones are refused, and what to do instead.
        harmless: values that change nothing here, also as entries of a list.
        is_harmless: no value changes anything here.
    """

    why: str
    harmless: tuple[Any, ...] = (None,)
    is_harmless: bool = False

    def accepts(self, value: Any) -> bool:
        """Return True for a value that changes nothing here."""
        if self.is_harmless or any(value is each or value == each for each in self.harmless):
            return True
        return isinstance(value, (list, tuple)) and all(map(self.accepts, value))


NOTHING: tuple[Any, ...] = (None, False, 0, "", "auto", [], {}, ())


def _setting(why: str, *harmless: Any, is_harmless: bool = False) -> VllmOption:
    """Return an option that accepts NOTHING and some further values."""
    return VllmOption(why, (*NOTHING, *harmless), is_harmless)


_LORA = _setting("LoRA is not supported; merge the adapter into the checkpoint")
_PICTURES = _setting("models read texts only; leave it out")
_OFFLOAD = _setting("weights stay on the device; quantization makes them smaller")
_NO_EFFECT = _setting("it changes no output here", is_harmless=True)
_POOLING = _setting("models generate text only", "generate", "none")
_RANKS = _setting("one call starts all ranks; use data_parallel_size, executor and network_interface")
_NO_CODE = _setting("code of others is not loaded into the engine")

SETTINGS = {
    **dict.fromkeys(
        (
            *("disable_log_requests", "enable_log_requests", "served_model_name", "use_tqdm_on_load"),
            *("disable_custom_all_reduce", "disable_cascade_attn", "enable_flashinfer_autotune"),
            *("max_logprobs", "compilation_config", "optimization_level", "performance_mode"),
            *("cuda_graph_sizes", "use_v2_block_manager", "cudagraph_capture_sizes"),
            *("max_cudagraph_capture_size", "max_seq_len_to_capture", "skip_tokenizer_init"),
            *("max_parallel_loading_workers", "prefix_caching_hash_algo", "disable_hybrid_kv_cache_manager"),
            *("code_revision", "hf_token", "num_lookahead_slots"),
            *("enable_trace_replay", "enable_sleep_mode", "allowed_local_media_path", "allowed_media_domains"),
            *("limit_mm_per_prompt", "disable_mm_preprocessor_cache", "mm_processor_cache_gb"),
            *("skip_mm_profiling", "disable_chunked_mm_input", "max_num_partial_prefills"),
            *("max_long_partial_prefills", "long_prefill_token_threshold", "stream_interval"),
            *("guided_decoding_backend", "structured_outputs_config", "language_model_only"),
            *("shutdown_timeout", "log_level", "kv_cache_metrics", "cudagraph_metrics", "ignore_patterns"),
            *("pt_load_map_location", "disable_async_output_proc", "watermark", "async_scheduling_mode"),
            *("fail_on_environ_validation",),
        ),
        _NO_EFFECT,
    ),
    **dict.fromkeys(
        ("enable_lora", "default_mm_loras", "fully_sharded_loras", "enable_lora_bias", "max_cpu_loras", "lora_dtype"),
        _LORA,
    ),
    **dict.fromkeys(("max_loras", "max_lora_rank", "lora_extra_vocab_size"), _NO_EFFECT),
    **dict.fromkeys(
        ("mm_processor_kwargs", "media_io_kwargs", "enable_mm_embeds", "enable_prompt_embeds", "interleave_mm_strings"),
        _PICTURES,
    ),
    **dict.fromkeys(("cpu_offload_gb", "offload_backend", "offload_group_size"), _OFFLOAD),
    **dict.fromkeys(("task", "runner", "convert", "pooler_config", "override_pooler_config"), _POOLING),
    **dict.fromkeys(
        (
            *("data_parallel_rank", "data_parallel_address", "data_parallel_rpc_port", "data_parallel_start_rank"),
            *("data_parallel_size_local", "data_parallel_hybrid_lb", "data_parallel_external_lb"),
        ),
        _RANKS,
    ),
    **dict.fromkeys(
        (
            *("worker_cls", "worker_extension_cls", "scheduler_cls", "logits_processors", "io_processor_plugin"),
            *("reasoning_parser_plugin", "additional_config", "model_loader_extra_config"),
        ),
        _NO_CODE,
    ),
    "data_parallel_backend": _setting(_RANKS.why, "mp", "ray"),
    "tokenizer_mode": _setting("the tokenizer is that of the checkpoint's files", "hf", "fast"),
    "config_format": _setting("checkpoints have Hugging Face's layout; use the files of that layout", "hf"),
    "scheduling_policy": _setting("requests are served in the order of their arrival", "fcfs"),
    "prefill_context_parallel_size": _setting("use tensor_parallel_size", 1),
    "decode_context_parallel_size": _setting("use tensor_parallel_size", 1),
    "num_gpu_blocks_override": _setting("use kv_cache_memory"),
    "kv_transfer_config": _setting("use kv_transfer_address"),
    "kv_events_config": _setting("changes of the KV cache are not published"),
    "otlp_traces_endpoint": _setting("moeserve serve has this setting"),
    "chat_template": _setting("pass it to chat; moeserve serve has this setting"),
    "rope_scaling": _setting("use hf_overrides"),
    "rope_theta": _setting("use hf_overrides"),
    "hf_config_path": _setting("put config.json into the checkpoint's folder"),
    "calculate_kv_scales": _setting("an FP8 cache has a scale for each token and head"),
    "disable_sliding_window": _setting("set sliding_window in the checkpoint's config.json"),
    "kv_offloading_size": _setting("use kv_host_memory"),
}

SAMPLING_PARAMETERS = {
    "best_of": VllmOption("only as many outputs as are returned are computed; set n, and choose among the outputs"),
    "use_beam_search": VllmOption("use LLM.beam_search", (None, False)),
    "length_penalty": VllmOption("it belongs to beam search; use LLM.beam_search", (None, 1.0)),
    "early_stopping": VllmOption("it belongs to beam search; use LLM.beam_search", (None, False)),
    "logits_processors": VllmOption(
        "code of requests is never run; use logit_bias, allowed_token_ids, bad_words or structured_outputs", (None, [])
    ),
    "extra_args": VllmOption("nothing reads such arguments; leave them out", (None, {})),
    "spaces_between_special_tokens": VllmOption("no spaces are added between tokens", is_harmless=True),
    "skip_clone": VllmOption("parameters are always copied", is_harmless=True),
    "skip_reading_prefix_cache": VllmOption("it does not change the output; use cache_salt", is_harmless=True),
    "output_text_buffer_length": VllmOption("text is held back while it may begin a stop string", is_harmless=True),
    "stream_interval": VllmOption("a stream yields each new output", (None, 1)),
    "flat_logprobs": VllmOption("log-probabilities are dicts", (None, False)),
    "logprob_token_ids": VllmOption("use logprobs, also -1 for all tokens", (None, [])),
    "prompt_logprob_token_ids": VllmOption("use prompt_logprobs, also -1 for all tokens", (None, [])),
    "prompt_logprob_start": VllmOption("prompt_logprobs are those of the whole prompt", (None, 0)),
    "thinking_token_budget": VllmOption("the length of reasoning is not limited; use max_tokens"),
    "repetition_detection": VllmOption("use repetition_penalty or frequency_penalty"),
    "watermarking": VllmOption("outputs have no watermark", (None, False)),
}

ARGUMENTS = {  # arguments of methods
    "lora_request": _LORA,
    "priority": _setting("requests are served in the order of their arrival; give 0 or leave it out"),
    "tokenization_kwargs": _setting("use SamplingParams(truncate_prompt_tokens=...), or pass token ids"),
    "mm_processor_kwargs": _PICTURES,
    "chat_template_content_format": _setting("contents have the form that the chat template reads; leave it out"),
    "trace_headers": _setting("only moeserve serve traces requests; leave it out"),
    "data_parallel_rank": _setting("requests go to the replica with the least work; leave it out"),
}

# Settings whose flags have no value.
SWITCHES = frozenset(
    [
        *(name for name in SETTINGS if name.startswith(("enable_", "disable_", "use_", "skip_", "calculate_"))),
        *("fully_sharded_loras", "interleave_mm_strings", "language_model_only", "kv_cache_metrics"),
        *("cudagraph_metrics", "data_parallel_hybrid_lb", "data_parallel_external_lb", "fail_on_environ_validation"),
    ]
)
# Values of moeserve's own settings that vLLM writes differently.
_OTHER_VALUES: dict[str, dict[str, str]] = {
    "load_format": dict.fromkeys(("safetensors", "hf", "fastsafetensors"), "auto"),
    "model_impl": {"vllm": "moeserve"},
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": "modelopt"},
}
# Own settings for which None stands for the default.
_NONE_IS_DEFAULT = (
    "enable_prefix_caching",
    "async_scheduling",
    "attention_backend",
    "load_format",
    "model_impl",
    "dtype",
)


def without_harmless(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options, without vLLM's options that change nothing, and with moeserve's values of the others.

    Raises:
        SettingsError: an option of vLLM would change something that moeserve does not do.
    """
    kept = {}
    for name, value in options.items():
        if name in SETTINGS:
            if (reason := refusal(SETTINGS, name, value)) is not None:
                raise SettingsError(reason)
        elif value is not None or name not in _NONE_IS_DEFAULT:
            kept[name] = own_value(name, value)
    return kept


def own_value(name: str, value: Any) -> Any:
    """Return the value of a setting as moeserve writes it, given as vLLM writes it."""
    return _OTHER_VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value


def require_harmless(options: Mapping[str, VllmOption], **values: Any) -> None:
    """Raise RequestError for a sampling parameter or an argument, unless its value changes nothing."""
    for name, value in values.items():
        if (reason := refusal(options, name, value)) is not None:
            raise RequestError(reason, parameter=name, code="unsupported_parameter")


def refusal(options: Mapping[str, VllmOption], name: str, value: Any) -> str | None:
    """Return the error message for a value that would change something; None for a harmless value."""
    option = options[name]
    return None if option.accepts(value) else f"{name}={shown(value)} is not supported: {option.why}"
