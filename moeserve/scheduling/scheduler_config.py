"""The limits of one replica's scheduling."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.config.routes import RouteShape
from moeserve.kv.rules import CacheGroup


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The limits of one replica's scheduling."""

    num_blocks: int  # blocks of layers that keep all tokens, enough for one request of `max_model_len` tokens
    block_size: int  # tokens per block
    max_num_seqs: int  # maximum number of running requests
    max_num_batched_tokens: int  # maximum number of tokens in one step
    max_model_len: int  # maximum number of tokens of a request, prompt and output together
    enable_prefix_caching: bool
    # True: plan tokens before the preceding token is sampled; ranks append the tokens that they sample. False: wait
    # until the preceding token is committed; plans then send tokens to the ranks, not all of which may sample.
    plans_ahead: bool = True
    max_prefill_tokens: int = 0  # upper limit of prefill budgets; 0: prefill budgets are ignored
    num_batches: int = 1  # number of plans over which running requests are divided
    # Number of positions after a request's last draft that drafting computes. The request gets blocks for these
    # positions if enough are free.
    num_lookahead_tokens: int = 0
    # Groups of layers that keep less than all tokens, each with the number of places for its items.
    other_groups: tuple[CacheGroup, ...] = ()
    routes: RouteShape | None = None  # shape of the routed experts that updates have; None: updates have none
    # Seconds that a decoding request may wait while others have their turns; 0: all decode at once (`turns.py`)
    longest_turn_wait: float = 0.0
    recomputes_drafts: bool = False  # accepted drafts must be computed again, because layers do not keep their changes
