"""The log-probabilities of given sequences, such as finished rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeserve.config.settings import LogprobsMode
from moeserve.errors import RequestError, shown
from moeserve.outputs import RequestOutput, SequenceScore
from moeserve.sampling_params import SamplingParams


def requests_of(
    sequences: Any,
    prompt_lengths: Any,
    temperature: float,
    top_logprobs: int,
    mode: LogprobsMode,
    routed_experts: Any = None,
) -> tuple[list[dict[str, Any]], list[SamplingParams], list[int]]:
    """Return the prompts and sampling parameters whose outputs contain the scores, and each sequence's prompt length.

    Each prompt is a sequence without its last token, which is the output, so a sequence may fill the whole context.

    Raises:
        RequestError: an argument cannot be served.
    """
    if isinstance(prompt_lengths, int):
        prompt_lengths = [prompt_lengths] * len(sequences)
    if len(prompt_lengths) != len(sequences):
        raise RequestError(
            f"{len(sequences)} sequences came with {len(prompt_lengths)} prompt_lengths; give one for each",
            parameter="prompt_lengths",
        )
    if mode.startswith("raw") and temperature != 1:
        raise RequestError(
            f"temperature={shown(temperature)} changes no log-probability in the mode {mode!r}; leave it out, or make "
            "the engine with logprobs_mode='processed_logprobs'",
            parameter="temperature",
        )
    routes = [None] * len(sequences) if routed_experts is None else routed_experts
    if len(routes) != len(sequences):
        raise RequestError(
            f"{len(sequences)} sequences came with {len(routes)} routed_experts; give an array for each, or None",
            parameter="routed_experts",
        )
    prompts: list[dict[str, Any]] = []
    params = []
    for place, (sequence, length, of_tokens) in enumerate(zip(sequences, prompt_lengths, routes, strict=True)):
        token_ids = sequence.tolist() if hasattr(sequence, "tolist") else sequence
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str) or len(token_ids) < 2:
            raise RequestError(
                f"sequence {place}={shown(token_ids)} must be a list of at least two token ids", parameter="sequences"
            )
        if type(length) is not int or not 1 <= length < len(token_ids):
            raise RequestError(
                f"prompt_lengths[{place}]={shown(length)} must be from 1 to {len(token_ids) - 1}, because sequence "
                f"{place} has {len(token_ids)} tokens and the first one has no log-probability",
                parameter="prompt_lengths",
            )
        prompts.append({"prompt_token_ids": token_ids[:-1], "routed_experts": of_tokens})
        params.append(
            SamplingParams(
                temperature=temperature,
                logprobs=top_logprobs,
                prompt_logprobs=top_logprobs,
                trace_decode_token_ids=[token_ids[-1]],
                detokenize=False,
            )
        )
    return prompts, params, list(prompt_lengths)


def score_of(output: RequestOutput, prompt_length: int) -> SequenceScore:
    """Return the score of one sequence, given the output of its request."""
    (last,) = output.outputs
    assert output.prompt_logprobs is not None
    assert last.logprobs is not None
    token_ids = [*output.prompt_token_ids[prompt_length:], *last.token_ids]
    positions = [*output.prompt_logprobs[prompt_length:], *last.logprobs]
    by_token = [position for position in positions if position is not None]
    logprobs = [position[token_id].logprob for token_id, position in zip(token_ids, by_token, strict=True)]
    return SequenceScore(token_ids, logprobs, by_token, last.routed_experts)
