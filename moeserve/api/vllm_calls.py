"""Methods and attributes of vLLM that moeserve does not have: errors that name them and say what to do."""

from __future__ import annotations

from moeserve.errors import UnsupportedError

_POOLING = "models generate text only; `score` returns log-probabilities of tokens"
NAMES = {
    "collective_rpc": "no code runs in the ranks; the settings and methods of LLM are all that they do",
    "apply_model": "no code runs in the ranks; load the checkpoint with transformers to look at its weights",
    **dict.fromkeys(("encode", "embed", "classify", "reward"), _POOLING),
    **dict.fromkeys(("sleep", "wake_up"), "use those of LLM or AsyncLLM"),
    "set_tokenizer": "name the tokenizer's folder when the engine is made: LLM(tokenizer=...)",
    **dict.fromkeys(("start_profile", "stop_profile"), "use LLM.start_profile, or a profiler of processes"),
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), "LoRA is not supported; merge the adapter"),
    **dict.fromkeys(("pause_generation", "resume_generation"), "use pause and resume"),
    "preprocess_chat": "use chat_prompt",
    **dict.fromkeys(
        ("model_config", "get_model_config", "vllm_config"), "use config, such as config.schedule.max_model_len"
    ),
}


def missing_attribute(owner: str, name: str) -> AttributeError:
    """Return the error for an attribute that a class does not have."""
    if name in NAMES:
        return UnsupportedError(f"{owner}.{name} is not supported: {NAMES[name]}")
    return AttributeError(f"{owner!r} object has no attribute {name!r}")
