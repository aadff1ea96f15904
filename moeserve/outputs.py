"""Results of `LLM`: a prompt, its outputs, their log-probabilities, and the score of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Logprob:
    """Log-probability (natural logarithm) of one token."""

    logprob: float
    rank: int  # 1: the most likely token
    decoded_token: str | None = None


@dataclass(frozen=True)
class SequenceScore:
    """The log-probabilities of the tokens of a sequence after its prompt."""

    token_ids: list[int]
    logprobs: list[float]  # log-probability of each token, given all tokens before it
    top_logprobs: list[dict[int, Logprob]]  # by position: the token's own, and those of the most likely tokens
    # The experts that have computed the sequence, as in `CompletionOutput`.
    routed_experts: npt.NDArray[np.integer[Any]] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class WeightSpan:
    """Consecutive tokens of an output that one version of the weights has computed."""

    version: str
    start: int  # index of the first token
    stop: int  # index after the last token


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a prompt, as generated so far."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    weight_versions: tuple[WeightSpan, ...] = ()  # spans that cover all tokens so far
    # The experts [tokens - 1, layers, experts of a token] of prompt and output, uint8 or uint16, once the output has
    # ended. The last token was not computed, and layers without experts have zeros. None without
    # `enable_return_routed_experts`.
    routed_experts: npt.NDArray[np.integer[Any]] | None = field(default=None, compare=False)
    lora_request: None = None  # vLLM's; LoRA is not supported

    def finished(self) -> bool:
        """Return True if the output has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and all its outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None  # by position; the dicts are created when read
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None  # for the engine that continues; see `SamplingParams`
    # Fields of vLLM that are always None here.
    metrics: None = None  # see `LLM.get_metrics`
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
