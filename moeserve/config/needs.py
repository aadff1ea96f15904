"""Demands of the networks of a model on the settings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Demands of one network, or of a whole model, on the settings. `of_all` joins the demands of several networks."""

    block_size: int = 16  # default number of tokens in a block of the KV cache
    block_multiple: int = 1  # block sizes must be multiples of this
    fits_float8_cache: bool = True  # the cache can hold 8-bit floats
    keeps_state: bool = False  # has a recurrent state for each request; for a whole model, its cache rules decide this
    redoes_drafts: bool = False  # keeps no state between draft tokens, so accepted draft tokens are computed again
    # reads what an earlier layer has chosen, so both layers must be in one pipeline stage
    reads_earlier_layer: bool = False
    without_gpu_kernels: str | None = None  # the part that has no kernels for GPUs
    without_gpu_order: str | None = None  # the part whose sums have no fixed order on GPUs


def of_all(needs: Iterable[Needs]) -> Needs:
    """Return the demands of all networks together."""
    each = list(needs)

    def first(names: Iterable[str | None]) -> str | None:
        return next((name for name in names if name is not None), None)

    return Needs(
        block_size=max((one.block_size for one in each), default=Needs.block_size),
        block_multiple=math.lcm(*(one.block_multiple for one in each)),
        fits_float8_cache=all(one.fits_float8_cache for one in each),
        redoes_drafts=any(one.redoes_drafts for one in each),
        reads_earlier_layer=any(one.reads_earlier_layer for one in each),
        without_gpu_kernels=first(one.without_gpu_kernels for one in each),
        without_gpu_order=first(one.without_gpu_order for one in each),
    )
