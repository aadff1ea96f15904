"""The limits of one replica's scheduling."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.scheduling.state_pool import STATE_INTERVAL


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The limits of one replica's scheduling."""

    num_blocks: int  # of KV cache, enough for one request of `max_model_len` tokens
    block_size: int  # tokens
    max_num_seqs: int  # requests that run at once
    max_num_batched_tokens: int  # of one step
    max_model_len: int  # tokens of a request, prompt and output together
    enable_prefix_caching: bool
    # Plan tokens whose predecessor is not sampled yet; ranks append what they sample. False: wait until it is
    # committed; then plans bring the tokens to the ranks, not all of which may sample.
    plans_ahead: bool = True
    max_prefill_tokens: int = 0  # most that a prefill budget allows; 0: prefill budgets are ignored
    num_batches: int = 1  # in which the requests run, if each plan takes its share of them
    # Positions behind a request's last draft for which it gets blocks, if there are any: drafting computes them.
    num_lookahead_tokens: int = 0
    num_saved_states: int | None = None  # rows for saved recurrent states; None: no layer of the model has a state
    recomputes_drafts: bool = False  # layers keep only what the tokens before the drafts of a chunk have changed
    window: int = 0  # tokens of which layers with windows keep blocks; 0: all, in the blocks of the other layers
    num_window_blocks: int = 0  # of these layers
    state_interval: int = STATE_INTERVAL  # tokens between the positions of saved states, rounded up to whole blocks
