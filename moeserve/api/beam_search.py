"""Beam search: the most likely outputs of a prompt, found by keeping a number of candidates at each length."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from moeserve.outputs import Logprob, RequestOutput
from moeserve.sampling_params import BeamSearchParams, SamplingParams


@dataclass(frozen=True, kw_only=True)
class BeamSearchSequence:
    """A prompt and an output of beam search."""

    tokens: list[int]  # tokens of the prompt and the output
    cum_logprob: float = 0.0  # log-probability of the output
    # log-probabilities of the most likely tokens at each position
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    text: str | None = None  # text of the prompt and the output
    finish_reason: str | None = None  # "stop": by the end-of-sequence token; "length"
    stop_reason: int | None = None


@dataclass(frozen=True)
class BeamSearchOutput:
    """The outputs of one prompt, the best one first."""

    sequences: list[BeamSearchSequence]


def search(
    prompts: list[list[int]],
    params: BeamSearchParams,
    generate: Callable[[list[list[int]], SamplingParams], list[RequestOutput]],
    *,
    end_token_ids: Collection[int],
    max_model_len: int,
) -> list[list[BeamSearchSequence]]:
    """Return the best sequences of each prompt, without texts.

    At each length, every candidate is continued by the `2 * beam_width` most likely tokens. Continuations by an end
    token are complete; the `beam_width` best other continuations are the next candidates. As in vLLM, a sequence's
    score is its log-probability divided by its length to the power `length_penalty`. The length includes the prompt,
    but no end token.

    Args:
        generate: returns the outputs of prompts.
    """
    step = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2 * params.beam_width, detokenize=False)
    ends = frozenset[int]() if params.ignore_eos else frozenset(end_token_ids)

    def score(sequence: BeamSearchSequence) -> float:
        length = len(sequence.tokens) - (sequence.finish_reason == "stop")
        return float(sequence.cum_logprob / length**params.length_penalty)

    def best(sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(sequences, key=score, reverse=True)[: params.beam_width]

    candidates = [[BeamSearchSequence(tokens=list(prompt))] for prompt in prompts]
    complete: list[list[BeamSearchSequence]] = [[] for _ in prompts]
    for _ in range(params.max_tokens):
        growing = [[each for each in some if len(each.tokens) < max_model_len] for some in candidates]
        for index, some in enumerate(candidates):
            complete[index] += [each for each in some if len(each.tokens) >= max_model_len]
        outputs = iter(generate([each.tokens for some in growing for each in some], step))
        for index, some in enumerate(growing):
            continued = [longer for each in some for longer in _continued(each, next(outputs), ends)]
            complete[index] += [each for each in continued if each.finish_reason == "stop"]
            candidates[index] = best([each for each in continued if each.finish_reason != "stop"])
        if not any(candidates):
            break
    return [best(done + rest) for done, rest in zip(complete, candidates, strict=True)]


def _continued(sequence: BeamSearchSequence, output: RequestOutput, ends: Collection[int]) -> list[BeamSearchSequence]:
    """Return one longer sequence for each of the most likely next tokens."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return [
        BeamSearchSequence(
            tokens=[*sequence.tokens, token_id],
            cum_logprob=sequence.cum_logprob + each.logprob,
            logprobs=[*sequence.logprobs, logprobs[0]],
            finish_reason="stop" if token_id in ends else "length",
            stop_reason=token_id if token_id in ends else None,
        )
        for token_id, each in logprobs[0].items()
    ]
