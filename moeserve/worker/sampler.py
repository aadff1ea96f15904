"""Samples the next token from each row of logits, independently of the other rows of the batch.

A random choice is counter-based: (seed, position) gives one number in [0, 1), which is looked up in the row's
cumulative probabilities, most likely token first. Of equally likely tokens the lower id comes first, everywhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.errors import EngineError
from moeserve.ops.interfaces import DrawTokens, Kernels
from moeserve.protocol import LogprobRows, TokenLogprobs
from moeserve.sampling_params import RequestParams
from moeserve.worker.grammars import AllowedTokens
from moeserve.worker.request_table import RequestState

# L rows of logits, R of them processed together, V vocabulary, H most likely tokens of a row, most likely first,
# N tokens of a row whose log-probabilities are returned, B bytes with a bit for each token

# Scores processed together by torch. This bounds the float64 copies: on a CPU they should stay in its cache.
PIECE_SIZE = {"cpu": 2**18, "cuda": 2**24}
# Scores processed together by a kernel, which bounds float32 copies.
KERNEL_PIECE_SIZE = 2**24
# Almost every random choice falls on one of this many most likely tokens. Only otherwise is the whole row sorted.
HEAD_SIZE = 256
# Penalties must not make a score infinite, because the difference of two infinities is NaN.
LARGEST_SCORE = torch.finfo(torch.float32).max
NO_TOKEN = -1
UNIFORMS_AT_ONCE = 32
Maxima: TypeAlias = tuple[Tensor, Tensor]  # each row's highest logit [L], and its token [L]
# The end of messages about NaN and infinity.
CAUSE_OF_DAMAGE = "its weights may be damaged, or its numbers too large for the dtype (float32 is the widest)"


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """How to sample the next token of a request."""

    params: RequestParams
    seed: int
    position: int  # number of output tokens before it; (seed, position) determines a random choice
    barred_token_ids: Sequence[int] = ()  # stop tokens, while below min_tokens
    prompt_token_ids: Sequence[int] = ()  # empty unless params.has_penalties
    output_token_ids: Sequence[int] = ()  # empty unless params.has_penalties
    allowed: AllowedTokens | None = None  # by the request's grammar; None: it has none


class SampledToken(NamedTuple):
    """The token sampled from one row."""

    token_id: int
    logprobs: TokenLogprobs | None = None  # None unless params.logprobs is set
    error: str | None = None  # why there is no token; `token_id` is then 0


def sample_spec(request: RequestState, allowed: AllowedTokens | None = None) -> SampleSpec:
    """Return how to sample the next token of a request."""
    position, params = request.num_output_tokens, request.params
    num_prompt_tokens = request.num_prompt_tokens if params.has_penalties else len(request.token_ids)
    return SampleSpec(
        params=params,
        seed=request.seed,
        position=position,
        barred_token_ids=request.end_token_ids if position < params.min_tokens else (),
        prompt_token_ids=request.token_ids[:num_prompt_tokens] if params.has_penalties else (),
        output_token_ids=request.token_ids[num_prompt_tokens:],
        allowed=allowed,
    )


def sample(
    logits_LV: Tensor, specs: Sequence[SampleSpec], kernels: Kernels, maxima_L: Maxima | None = None
) -> list[SampledToken]:
    """Sample one token per row as `specs[row]` describes; see `SamplingParams` for the order of operations.

    A row that contains NaN or infinity, all of whose tokens are barred, or whose grammar failed, gets an error.

    Args:
        logits_LV: [rows, vocabulary], any floating type and device. Not changed.
        maxima_L: of these logits, if they are known.
    """
    assert logits_LV.shape[0] == len(specs), f"{logits_LV.shape[0]} rows of logits for {len(specs)} specs"
    highest_L, most_likely_L = maxima_L or kernels.row_maximum(logits_LV)
    errors = {row: spec.allowed.error for row, spec in enumerate(specs) if spec.allowed and spec.allowed.error}
    errors |= _errors_of_rows(highest_L, logits_LV.dtype)
    chosen = most_likely_L.tolist()
    changed = [row for row, spec in enumerate(specs) if row not in errors and _changes_scores(spec)]
    others = set(range(len(specs))).difference(errors, changed)
    drawn = [row for row in sorted(others) if specs[row].params.temperature > 0]
    piece_size = None if kernels.draw_tokens is None else KERNEL_PIECE_SIZE
    for rows in _pieces(drawn, logits_LV, piece_size):
        tokens = _draw(_rows(logits_LV, rows).float(), highest_L[rows], [specs[row] for row in rows], kernels)
        for row, token_id in zip(rows, tokens, strict=True):
            chosen[row] = token_id
    for rows in _pieces(changed, logits_LV, piece_size):
        tokens = _choose(logits_LV[rows].float(), [specs[row] for row in rows], kernels)
        for row, token_id in zip(rows, tokens, strict=True):
            chosen[row] = token_id
            if token_id == NO_TOKEN:
                by_grammar = "structured_outputs allow none of them here"
                errors[row] = f"all {logits_LV.shape[1]} tokens are barred, so none can be chosen; " + (
                    "bar fewer stop tokens" if specs[row].allowed is None else by_grammar
                )

    logprobs: dict[int, TokenLogprobs] = {}
    needing = [row for row, spec in enumerate(specs) if row not in errors and spec.params.logprobs is not None]
    for rows in _pieces(needing, logits_LV):
        nums_top = [specs[row].params.logprobs or 0 for row in rows]
        logprobs_R = _token_logprobs(logits_LV[rows], [chosen[row] for row in rows], nums_top)
        logprobs.update(zip(rows, logprobs_R, strict=True))
    return [
        SampledToken(0, error=errors[row]) if row in errors else SampledToken(token_id, logprobs.get(row))
        for row, token_id in enumerate(chosen)
    ]


def prompt_logprobs(logits_RV: Tensor, targets: list[int], num_top: int, kernels: Kernels) -> LogprobRows:
    """Return the log-probabilities of `targets[row]` and of the `num_top` most likely tokens of each row.

    Raises:
        EngineError: a row contains NaN or infinity.
    """
    assert logits_RV.shape[0] == len(targets), f"{logits_RV.shape[0]} rows of logits for {len(targets)} targets"
    for error in _errors_of_rows(kernels.row_maximum(logits_RV)[0], logits_RV.dtype).values():
        raise EngineError(error)
    pieces = [
        _logprob_columns(logits_RV[rows], [targets[row] for row in rows], num_top)
        for rows in _pieces(list(range(len(targets))), logits_RV)
    ]
    tokens_RN, logprobs_RN, ranks_RN = (torch.cat(column).cpu() for column in zip(*pieces, strict=True))
    return LogprobRows(
        len(targets),
        tokens_RN.to(torch.int32).numpy().tobytes(),
        logprobs_RN.numpy().tobytes(),
        ranks_RN.to(torch.int32).numpy().tobytes(),
    )


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of one position of one request (Philox 4x64, Salmon et al. 2011)."""
    block, offset = divmod(position, UNIFORMS_AT_ONCE)
    return _uniforms(seed, block)[offset]


@functools.lru_cache(maxsize=4096)
def _uniforms(seed: int, block: int) -> list[float]:
    """Return the random numbers of several positions: starting a generator takes longer than the numbers."""
    generator = np.random.Philox(key=seed, counter=block * UNIFORMS_AT_ONCE)
    numbers: list[float] = ((generator.random_raw(4 * UNIFORMS_AT_ONCE)[::4] >> np.uint64(11)) * 2.0**-53).tolist()
    return numbers


def needs_logits_only(request: RequestState) -> bool:
    """Return True if the next token depends on no earlier one, and nothing but the token is wanted."""
    params = request.params
    is_barred = request.num_output_tokens < params.min_tokens and bool(request.end_token_ids)
    return not (
        is_barred
        or params.has_penalties
        or params.logit_bias
        or params.grammar is not None
        or params.logprobs is not None
    )


def with_random_tokens(
    tokens_L: Tensor,
    logits_LV: Tensor,
    requests: Sequence[RequestState],
    kernels: Kernels,
    upload: Callable[[Sequence[npt.NDArray[Any]]], list[Tensor]],
) -> Tensor:
    """Return tokens [L] with random ones in rows that have a temperature. Does not wait for the device.

    Args:
        tokens_L: each row's most likely token.
        requests: of the rows, with `needs_logits_only`.
        upload: returns arrays on the device.
    """
    drawn = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    for rows in _pieces(drawn, logits_LV, KERNEL_PIECE_SIZE):
        assert kernels.draw_tokens is not None
        some = [requests[row] for row in rows]
        numbers = [uniform(request.seed, request.num_output_tokens) for request in some]
        rows_R, *arguments = upload([np.array(rows), *_draw_arguments([each.params for each in some], numbers)])
        scores_RV = logits_LV if len(rows) == len(logits_LV) else logits_LV.index_select(0, rows_R)
        tokens_L = tokens_L.index_copy(0, rows_R, kernels.draw_tokens(scores_RV.float(), *arguments))
    return tokens_L


def sampled_tokens(tokens_L: Tensor, highest_L: Tensor, dtype: torch.dtype) -> list[SampledToken]:
    """Return tokens, or errors of rows whose highest logit is NaN or infinite.

    Args:
        dtype: of the logits.
    """
    errors = _errors_of_rows(highest_L, dtype)
    return [
        SampledToken(0, error=errors[row]) if row in errors else SampledToken(token_id)
        for row, token_id in enumerate(tokens_L.tolist())
    ]


def _errors_of_rows(highest_L: Tensor, dtype: torch.dtype) -> dict[int, str]:
    """Return an error for each row whose highest logit is NaN or infinite."""
    return {
        row: f"the model produced {'NaN' if math.isnan(highest) else 'infinite'} logits ({dtype}); {CAUSE_OF_DAMAGE}"
        for row, highest in enumerate(highest_L.tolist())
        if not math.isfinite(highest)
    }


def _choose(scores_RV: Tensor, specs: list[SampleSpec], kernels: Kernels) -> list[int]:
    """Sample one token per row of float32 scores, which are changed in place. NO_TOKEN if all of a row are barred."""
    for row, spec in enumerate(specs):
        _adjust_scores(scores_RV[row], spec)
    highest_R, most_likely_R = kernels.row_maximum(scores_RV)
    chosen = most_likely_R.tolist()
    for row in highest_R.isneginf().nonzero()[:, 0].tolist():
        chosen[row] = NO_TOKEN
    random = [row for row, spec in enumerate(specs) if spec.params.temperature > 0 and chosen[row] != NO_TOKEN]
    if random:
        drawn = _draw(_rows(scores_RV, random), highest_R[random], [specs[row] for row in random], kernels)
        for row, token_id in zip(random, drawn, strict=True):
            chosen[row] = token_id
    return chosen


def _changes_scores(spec: SampleSpec) -> bool:
    return bool(spec.barred_token_ids or spec.allowed or spec.params.logit_bias or spec.params.has_penalties)


def _adjust_scores(scores_V: Tensor, spec: SampleSpec) -> None:
    """Apply bias, penalties, barred tokens and the grammar in place. What bars tokens comes last, so that no penalty
    lifts them.
    """
    params, vocabulary = spec.params, len(scores_V)
    bias = {token_id: value for token_id, value in params.logit_bias.items() if token_id < vocabulary}
    if bias:
        scores_V[_on(scores_V, list(bias))] += torch.tensor(list(bias.values()), device=scores_V.device)
    if params.repetition_penalty != 1.0:
        seen = _on(scores_V, [*spec.prompt_token_ids, *spec.output_token_ids])  # a token seen twice is written twice
        scores = scores_V[seen].double()
        penalised = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
        scores_V[seen] = penalised.clamp(-LARGEST_SCORE, LARGEST_SCORE).float()
    if spec.output_token_ids and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
        token_ids, counts = np.unique(spec.output_token_ids, return_counts=True)
        penalties = counts * params.frequency_penalty + params.presence_penalty
        scores_V[_on(scores_V, token_ids)] -= torch.from_numpy(penalties).float().to(scores_V.device)
    barred = [token_id for token_id in spec.barred_token_ids if token_id < vocabulary]
    if barred:
        scores_V[_on(scores_V, barred)] = -math.inf
    if spec.allowed is not None:
        bits_B = torch.from_numpy(spec.allowed.bits).to(scores_V.device).int()
        scores_V += _penalties_of_bits(scores_V.device).index_select(0, bits_B).flatten()[:vocabulary]


@functools.cache
def _penalties_of_bits(device: torch.device) -> Tensor:
    """Return [256, 8]: for each byte, zero where a bit is set and -inf elsewhere. Six times as fast as a mask."""
    is_set = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(is_set == 1, 0.0, -math.inf).to(device)


def _on(scores_V: Tensor, token_ids: Sequence[int] | np.ndarray) -> Tensor:
    """Return token ids as an index on the device of the scores."""
    return torch.from_numpy(np.asarray(token_ids, np.int64)).to(scores_V.device)


def _draw(scores_RV: Tensor, highest_R: Tensor, specs: list[SampleSpec], kernels: Kernels) -> list[int]:
    """Draw one random token per row. Only the head of a row is sorted, unless the choice falls outside of it."""
    if kernels.draw_tokens is not None:
        return _draw_with_kernel(kernels.draw_tokens, scores_RV, specs)
    temperatures_R = torch.tensor([spec.params.temperature for spec in specs], dtype=torch.float64)
    # Subtracting the highest before dividing avoids infinity / infinity at the smallest temperatures.
    shifted_RV = (scores_RV - highest_R[:, None]).double()
    probabilities_RV = torch.softmax(shifted_RV / temperatures_R.to(scores_RV.device)[:, None], dim=-1)
    keys_RV = _order_keys(scores_RV)
    head_RH = _tokens_of(keys_RV.topk(min(HEAD_SIZE, keys_RV.shape[1])).values)
    head_probabilities_RH = probabilities_RV.gather(1, head_RH).cpu().numpy()
    is_whole_row = head_RH.shape == scores_RV.shape

    drawn: list[int] = []
    for row, (order_H, spec) in enumerate(zip(head_RH.cpu(), specs, strict=True)):
        number = uniform(spec.seed, spec.position)
        place = _place(head_probabilities_RH[row], spec.params, number, is_whole_row=is_whole_row)
        if place is None:
            # numpy sorts integers several times faster than torch.
            order_H = _tokens_of(torch.from_numpy(np.sort(keys_RV[row].cpu().numpy())[::-1].copy()))
            place = _place(probabilities_RV[row].cpu()[order_H].numpy(), spec.params, number, is_whole_row=True)
        assert place is not None, "a whole row always has a choice"
        drawn.append(int(order_H[place]))
    return drawn


def _draw_with_kernel(kernel: DrawTokens, scores_RV: Tensor, specs: list[SampleSpec]) -> list[int]:
    numbers = [uniform(spec.seed, spec.position) for spec in specs]
    arguments = _draw_arguments([spec.params for spec in specs], numbers)
    tokens: list[int] = kernel(scores_RV, *(torch.from_numpy(each).to(scores_RV.device) for each in arguments)).tolist()
    return tokens


def _draw_arguments(params: Sequence[RequestParams], numbers: Sequence[float]) -> list[npt.NDArray[Any]]:
    """Return the arguments of `DrawTokens` after the scores, on the host."""
    return [
        np.array([each.temperature for each in params], np.float32),
        np.array([each.top_k for each in params], np.int64),
        np.array([each.top_p for each in params], np.float32),
        np.array([each.min_p for each in params], np.float32),
        np.array(numbers, np.float64),
    ]


def _place(probabilities_H: np.ndarray, params: RequestParams, number: float, *, is_whole_row: bool) -> int | None:
    """Return the index of the kept token at `number` in [0, 1) of their probability; None if more of the row is needed.

    The most likely tokens come first, so each of `min_p`, `top_k` and `top_p` keeps a prefix of the row.
    """
    num_kept = int(np.count_nonzero(probabilities_H >= params.min_p * probabilities_H[0]))
    if params.top_k > 0:
        num_kept = min(num_kept, params.top_k)
    cumulative_H = np.cumsum(probabilities_H[:num_kept])
    if is_whole_row or num_kept < len(probabilities_H):
        total = cumulative_H[-1]
    elif params.min_p == 0.0 and params.top_k <= 0:
        total = 1.0  # all tokens are kept, so their probabilities add up to one
    else:
        return None

    if params.top_p < 1.0:
        crossing = int(np.searchsorted(cumulative_H, params.top_p * total))  # the token that reaches the bound
        if crossing == len(cumulative_H):
            return None
        total = cumulative_H[crossing]
    # On a whole row this always finds a possible token: a number below one times a total rounds to less than the total.
    place = int(np.searchsorted(cumulative_H, number * total, side="right"))
    return place if place < len(cumulative_H) else None


def _order_keys(scores_RV: Tensor) -> Tensor:
    """Return distinct integers that order tokens by (score descending, id ascending) when sorted descending.

    A key has the bits of the float32 score, mapped to integer order, above those of the negated id.
    """
    bits_RV = (scores_RV + 0.0).view(torch.int32)  # adding zero makes -0.0 equal to 0.0
    ordered_RV = bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)
    return ordered_RV.long() * 2**32 - torch.arange(scores_RV.shape[1], device=scores_RV.device)


def _tokens_of(keys: Tensor) -> Tensor:
    """Return the token ids of order keys."""
    return (-keys) & 0xFFFFFFFF


def _token_logprobs(logits_RV: Tensor, targets: list[int], nums_top: list[int]) -> list[TokenLogprobs]:
    tokens_RN, logprobs_RN, ranks_RN = _logprob_columns(logits_RV, targets, max(nums_top))
    columns = zip(tokens_RN.tolist(), logprobs_RN.tolist(), ranks_RN.tolist(), nums_top, strict=True)
    return [
        TokenLogprobs(token_ids=tokens[: 1 + num], logprobs=logprobs[: 1 + num], ranks=ranks[: 1 + num])
        for tokens, logprobs, ranks, num in columns
    ]


def _logprob_columns(logits_RV: Tensor, targets: list[int], num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, float32 log-probabilities and ranks of each row's target and its most likely tokens."""
    scores_RV = logits_RV.float()
    targets_R1 = torch.tensor(targets, device=logits_RV.device)[:, None]
    num_top = min(num_top, scores_RV.shape[1])
    tokens_RN = torch.cat([targets_R1, _tokens_of(_order_keys(scores_RV).topk(num_top).values)], dim=1)

    # Summed in float64: a float32 result then does not depend on the order in which a device adds.
    logprobs_RN = torch.log_softmax(scores_RV, dim=-1, dtype=torch.float64).gather(1, tokens_RN).float()
    scores_RN = scores_RV.gather(1, tokens_RN)
    target_ranks_R1 = 1 + (scores_RV > scores_RN[:, :1]).sum(dim=-1, keepdim=True)
    top_RH = scores_RN[:, 1:]
    top_ranks_RH = 1 + (top_RH[:, None, :] > top_RH[:, :, None]).sum(dim=-1)
    return tokens_RN, logprobs_RN, torch.cat([target_ranks_R1, top_ranks_RH], dim=1)


def _rows(scores_LV: Tensor, rows: list[int]) -> Tensor:
    """Return some rows in ascending order, without a copy if they are all."""
    return scores_LV if len(rows) == len(scores_LV) else scores_LV[rows]


def _pieces(rows: list[int], logits_LV: Tensor, num_scores: int | None = None) -> Iterator[list[int]]:
    """Yield the rows in pieces of at most `num_scores` scores, but of one row at least."""
    size = max(1, (num_scores or PIECE_SIZE[logits_LV.device.type]) // logits_LV.shape[1])
    for first in range(0, len(rows), size):
        yield rows[first : first + size]
