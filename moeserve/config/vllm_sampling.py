"""Sampling parameters of vLLM that have no effect here: values that change nothing are accepted, others refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moeserve.errors import RequestError, shown


@dataclass(frozen=True)
class _Parameter:
    why: str  # why other values are refused, and what to do
    harmless: tuple[Any, ...] = (None,)
    is_harmless: bool = False  # every value is


_PARAMETERS = {
    "best_of": _Parameter("only as many outputs as are returned are computed; set n, and choose among the outputs"),
    "use_beam_search": _Parameter("use LLM.beam_search", (None, False)),
    "length_penalty": _Parameter("it belongs to beam search; use LLM.beam_search", (None, 1.0)),
    "early_stopping": _Parameter("it belongs to beam search; use LLM.beam_search", (None, False)),
    "logits_processors": _Parameter(
        "code of requests is never run; use logit_bias, allowed_token_ids, bad_words or structured_outputs", (None, [])
    ),
    "extra_args": _Parameter("nothing reads such arguments; leave them out", (None, {})),
    "spaces_between_special_tokens": _Parameter("no spaces are added between tokens", is_harmless=True),
    "skip_clone": _Parameter("parameters are always copied", is_harmless=True),
    "skip_reading_prefix_cache": _Parameter("it does not change the output; use cache_salt", is_harmless=True),
    "output_text_buffer_length": _Parameter("text is held back while it may begin a stop string", is_harmless=True),
    "stream_interval": _Parameter("a stream yields each new output", (None, 1)),
    "flat_logprobs": _Parameter("log-probabilities are dicts", (None, False)),
    "logprob_token_ids": _Parameter("use logprobs, also -1 for all tokens", (None, [])),
    "prompt_logprob_token_ids": _Parameter("use prompt_logprobs, also -1 for all tokens", (None, [])),
    "prompt_logprob_start": _Parameter("prompt_logprobs are those of the whole prompt", (None, 0)),
    "routed_experts_prompt_start": _Parameter("experts of tokens are not returned", (None, 0)),
    "thinking_token_budget": _Parameter("the length of reasoning is not limited; use max_tokens"),
    "repetition_detection": _Parameter("use repetition_penalty or frequency_penalty"),
    "watermarking": _Parameter("outputs have no watermark", (None, False)),
}

NAMES = frozenset(_PARAMETERS)


def require_harmless(name: str, value: Any, num_outputs: int) -> None:
    """Raise RequestError for a value that would change the output.

    Args:
        name: one of NAMES.
        num_outputs: the `n` of the request.
    """
    parameter = _PARAMETERS[name]
    harmless = (*parameter.harmless, num_outputs) if name == "best_of" else parameter.harmless
    if not parameter.is_harmless and not any(value is each or value == each for each in harmless):
        raise RequestError(
            f"{name}={shown(value)} is not supported: {parameter.why}", parameter=name, code="unsupported_parameter"
        )
