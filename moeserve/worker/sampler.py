"""Sampling of the next token from each row of logits, independently of the other rows of the batch.

Everything is computed on the device of the logits, without waiting on the host. `ChooseTokens` chooses tokens
by the settings of their requests. For rows with bias, penalties, barred tokens or a grammar, it chooses from adjusted
copies of the logits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.config.settings import LogprobsMode
from moeserve.ops.sampling.interface import SamplingOperations
from moeserve.ops.sampling.reference import kept_tokens, order_keys, pieces, tokens_of
from moeserve.protocol import LogprobRows, TokenLogprobs
from moeserve.sampling_params import RequestParams
from moeserve.worker.grammars import AllowedTokens
from moeserve.worker.request_table import RequestState

# L sampled rows of logits, R rows that are processed together, V tokens of the vocabulary, W fields of
# SAMPLING_SETTINGS, N tokens of a row whose log-probabilities are returned, A adjusted rows, B bytes with a bit for
# each token

Array: TypeAlias = npt.NDArray[Any]
Upload: TypeAlias = Callable[[Sequence[Array]], list[Tensor]]  # returns arrays on the device
Chosen: TypeAlias = tuple[Tensor, Tensor]  # each row's highest score [L], and its token [L]; see `ChooseTokens`
NUM_PROMPT_TENSORS = 4
# Penalties must not make a score infinite, because the difference of two infinities is NaN.
LARGEST_SCORE = torch.finfo(torch.float32).max
# The end of messages about NaN and infinity.
CAUSE_OF_DAMAGE = "its weights may be damaged, or its numbers too large for the dtype (float32 is the widest)"


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """The inputs of sampling a row beyond the settings of its request."""

    params: RequestParams
    barred_token_ids: Sequence[int] = ()  # stop tokens, while below min_tokens; ends of bad words that have begun
    prompt_token_ids: Sequence[int] = ()  # empty unless params.has_penalties
    output_token_ids: Sequence[int] = ()  # empty unless params.has_penalties
    forced_token_id: int | None = None  # the only allowed token
    allowed: AllowedTokens | None = None  # tokens that the request's grammar allows; None: it has no grammar

    @property
    def changes_scores(self) -> bool:
        return bool(self.barred_token_ids or self.allowed) or self.params.changes_scores


class SampledToken(NamedTuple):
    """The token of one row, or the reason why none could be sampled."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """The results of sampling as tensors on the device."""

    tokens_L: Tensor
    highest_L: Tensor  # highest logit of each row
    dtype: torch.dtype  # dtype of the logits
    vocab_size: int = 0
    specs: Mapping[int, SampleSpec] = field(default_factory=dict)  # by row
    changed: Sequence[int] = ()  # rows whose scores were adjusted
    highest_A: Tensor | None = None  # highest adjusted score of each of these rows
    with_logprobs: Sequence[int] = ()  # rows whose log-probabilities are returned
    logprobs: tuple[Tensor, Tensor, Tensor] | None = None  # log-probabilities of these rows; see `_logprob_columns`

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that `results` needs on the host."""
        optional = (self.highest_A, *(self.logprobs or ()))
        return [self.tokens_L, self.highest_L, *(each for each in optional if each is not None)]

    def results(self, on_host: Sequence[Tensor]) -> list[SampledToken]:
        """Return the tokens of all rows.

        A row gets an error if it contains NaN or infinity, if all its tokens are barred, or if its grammar failed.

        Args:
            on_host: the tensors of the property `tensors`, copied to the host.
        """
        tokens_L, highest_L, *others = on_host
        errors = _errors_of_rows(highest_L, self.dtype)
        if not self.specs and not errors:
            return [SampledToken(token_id) for token_id in tokens_L.tolist()]
        for row, spec in self.specs.items():
            if spec.allowed is not None and spec.allowed.error:
                errors.setdefault(row, spec.allowed.error)
        if self.changed:
            for row, highest in zip(self.changed, others.pop(0).tolist(), strict=True):
                if highest == -math.inf:
                    by_grammar = "structured_outputs allow none of them here"
                    hint = "bar fewer tokens" if self.specs[row].allowed is None else by_grammar
                    errors.setdefault(row, f"all {self.vocab_size} tokens are barred, so none can be chosen; {hint}")
        logprobs: dict[int, TokenLogprobs] = {}
        for row, *columns in zip(self.with_logprobs, *others, strict=True):
            end = 1 + (self.specs[row].params.logprobs or 0)
            token_ids, numbers, ranks = (column[:end].tolist() for column in columns)
            logprobs[row] = TokenLogprobs(token_ids=token_ids, logprobs=numbers, ranks=ranks)
        return [
            SampledToken(token_id, logprobs.get(row), errors.get(row)) for row, token_id in enumerate(tokens_L.tolist())
        ]


def needs_tokens(request: RequestState) -> bool:
    """Return True if choosing a token requires the values of all earlier tokens on the host."""
    return request.params.needs_output


def sample_spec(request: RequestState, allowed: AllowedTokens | None = None, drafts: Sequence[int] = ()) -> SampleSpec:
    """Return the spec for sampling the token of a request after some drafts."""
    params, token_ids = request.params, [*request.token_ids, *drafts] if drafts else request.token_ids
    num_prompt_tokens, num_output_tokens = request.num_prompt_tokens, request.num_output_tokens + len(drafts)
    barred = [*request.end_token_ids] if num_output_tokens < params.min_tokens else []
    for *first, last in params.bad_token_ids:
        if len(first) <= num_output_tokens and token_ids[len(token_ids) - len(first) :] == first:
            barred.append(last)
    counted_from = num_prompt_tokens if params.has_penalties else len(token_ids)
    is_forced = num_output_tokens < len(params.forced_token_ids)
    return SampleSpec(
        params=params,
        barred_token_ids=barred,
        prompt_token_ids=token_ids[:num_prompt_tokens] if params.has_penalties else (),
        output_token_ids=token_ids[counted_from:],
        allowed=allowed,
        forced_token_id=params.forced_token_ids[num_output_tokens] if is_forced else None,
    )


def sample(
    logits_LV: Tensor,
    settings_LW: Tensor,
    positions_L: Tensor,
    specs: Mapping[int, SampleSpec],
    operations: SamplingOperations,
    upload: Upload,
    chosen_L: Chosen | None = None,
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> SampledRows:
    """Sample one token per row; see `SamplingParams` for the order of operations.

    Args:
        logits_LV: any floating dtype and device. Not modified.
        settings_LW, positions_L: see `ChooseTokens`.
        specs: specs of the rows that need more than their settings, by row.
        chosen_L: highest scores and tokens of the unadjusted logits, if already computed.
    """
    if not specs:
        highest_L, tokens_L = chosen_L or operations.choose_tokens(logits_LV, settings_LW, positions_L)
        return SampledRows(tokens_L=tokens_L, highest_L=highest_L, dtype=logits_LV.dtype)
    changed = [row for row, spec in specs.items() if spec.changes_scores]
    with_logprobs = [row for row, spec in specs.items() if spec.params.logprobs is not None]
    changed_A, with_logprobs_R = upload([np.array(rows, np.int64) for rows in (changed, with_logprobs)])
    if chosen_L is None:
        # All-zero settings are greedy, so no row is drawn twice.
        undrawn_LW = settings_LW.index_fill(0, changed_A, 0) if changed else settings_LW
        chosen_L = operations.choose_tokens(logits_LV, undrawn_LW, positions_L)
    highest_L, tokens_L = chosen_L
    highest_A: list[Tensor] = []
    for some in pieces(np.arange(len(changed)), logits_LV, in_float32=True):
        rows_R = changed_A[some[0] : some[-1] + 1]
        scores_RV = logits_LV.index_select(0, rows_R).float()
        _adjust_scores(scores_RV, [specs[changed[index]] for index in some], upload)
        highest_R, tokens_R = operations.choose_tokens(
            scores_RV, settings_LW.index_select(0, rows_R), positions_L.index_select(0, rows_R)
        )
        highest_A.append(highest_R)
        tokens_L = tokens_L.index_copy(0, rows_R, tokens_R)
    logprobs = None
    if with_logprobs:
        num_top = max(specs[row].params.logprobs or 0 for row in with_logprobs)
        targets_R, specs_R = tokens_L.index_select(0, with_logprobs_R), [specs[row] for row in with_logprobs]
        logprobs = _logprob_columns(logits_LV, with_logprobs_R, targets_R, num_top, specs_R, upload, mode=logprobs_mode)
    return SampledRows(
        tokens_L=tokens_L,
        highest_L=highest_L,
        dtype=logits_LV.dtype,
        vocab_size=logits_LV.shape[1],
        specs=specs,
        changed=changed,
        highest_A=torch.cat(highest_A) if changed else None,
        with_logprobs=with_logprobs,
        logprobs=logprobs,
    )


def prompt_logprobs(
    logits_RV: Tensor,
    targets_R: Tensor,
    params: RequestParams,
    operations: SamplingOperations,
    upload: Upload,
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> list[Tensor]:
    """Return log-probabilities of each row's target and of its `params.prompt_logprobs` most likely tokens.

    The result has NUM_PROMPT_TENSORS tensors, which `prompt_rows` reads. Processed log-probabilities of a prompt depend
    on the temperature, but on no other sampling parameter.
    """
    assert logits_RV.shape[0] == len(targets_R), f"{logits_RV.shape[0]} rows of logits for {len(targets_R)} targets"
    rows_R = torch.arange(len(targets_R), device=logits_RV.device)
    highest_R = operations.row_maximum(logits_RV)[0].to(logits_RV.dtype)
    specs_R = [SampleSpec(params=RequestParams(temperature=params.temperature))] * len(targets_R)
    num_top = params.prompt_logprobs or 0
    return [highest_R, *_logprob_columns(logits_RV, rows_R, targets_R, num_top, specs_R, upload, mode=logprobs_mode)]


def prompt_rows(on_host: Sequence[Tensor]) -> LogprobRows | str:
    """Return the values in the tensors of `prompt_logprobs`, or an error if a row contains NaN or infinity."""
    highest_R, tokens_RN, logprobs_RN, ranks_RN = on_host
    for error in _errors_of_rows(highest_R, highest_R.dtype).values():
        return error
    return LogprobRows(
        len(highest_R),
        tokens_RN.to(torch.int32).numpy().tobytes(),
        logprobs_RN.numpy().tobytes(),
        ranks_RN.to(torch.int32).numpy().tobytes(),
    )


def _errors_of_rows(highest_L: Tensor, dtype: torch.dtype) -> dict[int, str]:
    """Return an error for each row whose highest logit is NaN or infinite."""
    if bool(highest_L.isfinite().all()):
        return {}
    return {
        row: f"the model produced {'NaN' if math.isnan(highest) else 'infinite'} logits ({dtype}); {CAUSE_OF_DAMAGE}"
        for row, highest in enumerate(highest_L.tolist())
        if not math.isfinite(highest)
    }


class _Entries:
    """A list of entries of a matrix of scores, with a number for each."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._places: list[Array] = [np.zeros(0, np.int64)]
        self._numbers: list[Array] = [np.zeros(0, np.float64)]

    def add(self, row: int, token_ids: Iterable[int], numbers: Any) -> None:
        """Add entries of one row, with a number for each or one number for all. Tokens outside the row are ignored."""
        tokens = np.fromiter(token_ids, np.int64)
        is_inside = tokens < self._width
        self._places.append(row * self._width + tokens[is_inside])
        self._numbers.append(np.broadcast_to(np.asarray(numbers, np.float64), tokens.shape)[is_inside])

    @property
    def arrays(self) -> list[Array]:
        return [np.concatenate(self._places), np.concatenate(self._numbers)]


def _adjust_scores(scores_RV: Tensor, specs: Sequence[SampleSpec], upload: Upload) -> None:
    """Apply bias, penalties, barred and allowed tokens in place.

    Tokens are barred last, so that no penalty can raise their scores again.
    """
    width = scores_RV.shape[1]
    biased, seen, counted, barred = (_Entries(width) for _ in range(4))
    bitmaps: list[tuple[int, Array]] = []  # rows, and the tokens that grammars and lists allow
    num_bytes = max([-(-width // 8), *(len(spec.allowed.bits) for spec in specs if spec.allowed)])
    for row, spec in enumerate(specs):
        params = spec.params
        if params.logit_bias:
            biased.add(row, params.logit_bias.keys(), list(params.logit_bias.values()))
        if params.repetition_penalty != 1.0:
            seen.add(row, {*spec.prompt_token_ids, *spec.output_token_ids}, params.repetition_penalty)
        if spec.output_token_ids and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
            token_ids, counts = np.unique(spec.output_token_ids, return_counts=True)
            counted.add(row, token_ids, -(counts * params.frequency_penalty + params.presence_penalty))
        if spec.barred_token_ids:
            barred.add(row, spec.barred_token_ids, -math.inf)
        if spec.allowed is not None and not spec.allowed.error:
            bitmaps.append((row, spec.allowed.bits))
        if params.allowed_bits:
            bitmaps.append((row, np.frombuffer(params.allowed_bits, np.uint8)))
        if spec.forced_token_id is not None:
            bits = np.zeros(num_bytes, np.uint8)
            bits[spec.forced_token_id // 8] = 1 << spec.forced_token_id % 8
            bitmaps.append((row, bits))
    biased_P, bias_P, seen_P, penalties_P, counted_P, counts_P, barred_P, _, rows_G, bits_GB = upload(
        [
            *(array for entries in (biased, seen, counted, barred) for array in entries.arrays),
            np.array([row for row, _ in bitmaps], np.int64),
            np.array([np.pad(bits, (0, num_bytes - len(bits))) for _, bits in bitmaps], np.uint8).reshape(
                -1, num_bytes
            ),
        ]
    )
    scores_P = scores_RV.view(-1)
    if len(biased_P):
        scores_P.index_add_(0, biased_P, bias_P.float())
    if len(seen_P):
        old_P = scores_P.index_select(0, seen_P).double()
        new_P = torch.where(old_P > 0, old_P / penalties_P, old_P * penalties_P)
        scores_P.index_copy_(0, seen_P, new_P.clamp(-LARGEST_SCORE, LARGEST_SCORE).float())
    if len(counted_P):
        scores_P.index_add_(0, counted_P, counts_P.float())
    if len(barred_P):
        scores_P.index_fill_(0, barred_P, -math.inf)
    for some in pieces(np.arange(len(bitmaps)), scores_RV):
        bits_P = bits_GB[some[0] : some[-1] + 1].reshape(-1).int()
        penalties_GV = _penalties_of_bits(scores_RV.device).index_select(0, bits_P).view(len(some), -1)[:, :width]
        scores_RV.index_add_(0, rows_G[some[0] : some[-1] + 1], penalties_GV)


@functools.cache
def _penalties_of_bits(device: torch.device) -> Tensor:
    """Return a table [256, 8] with zero for each bit of a byte that is set, and -inf for the others.

    Looking up this table is six times as fast as a mask.
    """
    is_set = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(is_set == 1, 0.0, -math.inf).to(device)


def _logprob_columns(
    logits_LV: Tensor,
    rows_R: Tensor,
    targets_R: Tensor,
    num_top: int,
    specs_R: Sequence[SampleSpec],
    upload: Upload,
    *,
    mode: LogprobsMode,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, float32 log-probabilities and ranks, [R, N] each, of some rows' targets and most likely tokens."""
    columns = []
    for some in pieces(np.arange(len(rows_R)), logits_LV):
        place = slice(some[0], some[-1] + 1)
        scores_RV = logits_LV.index_select(0, rows_R[place]).float()
        temperature_R1: Tensor | None = None
        if mode in ("processed_logprobs", "processed_logits"):
            _process(scores_RV, specs_R[place], upload)
            (temperature_R,) = upload([np.array([spec.params.temperature or 1.0 for spec in specs_R[place]])])
            temperature_R1 = temperature_R[:, None]
        is_normalized = mode in ("raw_logprobs", "processed_logprobs")
        columns.append(_columns_of_piece(scores_RV, targets_R[place], num_top, temperature_R1, is_normalized))
    tokens_RN, numbers_RN, ranks_RN = (torch.cat(column) for column in zip(*columns, strict=True))
    return tokens_RN, numbers_RN, ranks_RN


def _process(scores_RV: Tensor, specs: Sequence[SampleSpec], upload: Upload) -> None:
    """Change scores in place to the scores from which a token is drawn, before the division by the temperature.

    A forced token does not bar other tokens here, so its log-probability is the log-probability of drawing it. Waits on
    the host for requests with `min_p`, `top_k` or `top_p`.
    """
    if any(spec.changes_scores for spec in specs):
        _adjust_scores(scores_RV, [dataclasses.replace(spec, forced_token_id=None) for spec in specs], upload)
    for scores_V, spec in zip(scores_RV, specs, strict=True):
        params = spec.params
        if params.temperature > 0 and (params.min_p > 0 or params.top_k > 0 or params.top_p < 1):
            kept_K, _ = kept_tokens(scores_V, params.temperature, params.min_p, params.top_k, params.top_p)
            kept_scores_K = scores_V[kept_K]
            scores_V.fill_(-math.inf)[kept_K] = kept_scores_K


def _columns_of_piece(
    scores_RV: Tensor, targets_R: Tensor, num_top: int, temperature_R1: Tensor | None, is_normalized: bool
) -> tuple[Tensor, Tensor, Tensor]:
    num_top = min(num_top, scores_RV.shape[1])
    tokens_RN = torch.cat([targets_R[:, None], tokens_of(order_keys(scores_RV).topk(num_top).values)], dim=1)

    # Add in float64, so that the float32 result does not depend on the order in which a device adds.
    numbers_RV = scores_RV.double()
    if is_normalized and temperature_R1 is not None:  # subtracting first avoids infinity at the smallest temperatures
        numbers_RV -= numbers_RV.amax(dim=-1, keepdim=True)
    if temperature_R1 is not None:
        numbers_RV /= temperature_R1
    if is_normalized:
        numbers_RV = torch.log_softmax(numbers_RV, dim=-1)
    numbers_RN = numbers_RV.gather(1, tokens_RN).float()
    scores_RN = scores_RV.gather(1, tokens_RN)
    target_ranks_R1 = 1 + (scores_RV > scores_RN[:, :1]).sum(dim=-1, keepdim=True)
    # The negated scores ascend, and the rank of a token is given by the first token with an equal score.
    rising_RH = -scores_RN[:, 1:]
    top_ranks_RH = 1 + torch.searchsorted(rising_RH, rising_RH)
    return tokens_RN, numbers_RN, torch.cat([target_ranks_R1, top_ranks_RH], dim=1)
