"""Sampling without requests: rows of logits, each with a seed and a position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moeserve.config.settings import LogprobsMode
from moeserve.ops.sampling.interface import SamplingOperations
from moeserve.sampling_params import RequestParams
from moeserve.step_inputs import SAMPLING_SETTINGS, as_integers
from moeserve.worker import sampler
from moeserve.worker.sampler import SampledToken, SampleSpec


@dataclass(frozen=True, kw_only=True)
class RowSpec(SampleSpec):
    """How to sample one row."""

    seed: int = 0
    position: int = 0  # number of output tokens before

    @property
    def is_special(self) -> bool:
        return self.changes_scores or self.params.logprobs is not None


NUM_PROMPT_TOKENS = 3


def settings_of(params: Sequence[RequestParams], seeds: Sequence[int]) -> Tensor:
    """Return the settings of rows [R, W], whose requests have NUM_PROMPT_TOKENS."""
    records = [
        (each.temperature, each.top_p, each.min_p, each.top_k, NUM_PROMPT_TOKENS, seed)
        for each, seed in zip(params, seeds, strict=True)
    ]
    return torch.from_numpy(as_integers(np.array(records, SAMPLING_SETTINGS)))


def positions_of(num_outputs: Sequence[int]) -> Tensor:
    """Return the positions of the newest tokens of requests with so many output tokens."""
    return torch.tensor([NUM_PROMPT_TOKENS + number - 1 for number in num_outputs], dtype=torch.int64)


def uploaded(arrays: Sequence[sampler.Array]) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


def sampled(
    logits_LV: Tensor,
    rows: Sequence[RowSpec],
    operations: SamplingOperations,
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> list[SampledToken]:
    """Return the tokens of all rows. Nothing more is done for rows that need nothing more."""
    results = sampler.sample(
        logits_LV,
        settings_of([row.params for row in rows], [row.seed for row in rows]),
        positions_of([row.position for row in rows]),
        {index: row for index, row in enumerate(rows) if row.is_special},
        operations,
        uploaded,
        logprobs_mode=logprobs_mode,
    )
    return results.results(results.tensors)
