"""Messages between the control plane and the ranks: requests, step plans, step results.

Plain data only: token ids and block ids are Python integers, never tensors.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from moeserve.outputs import FinishReason
from moeserve.sampling_params import RequestParams
from moeserve.telemetry.expert_load import LoadWindow


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. A prompt with `n` > 1 becomes n requests."""

    request_id: str
    prompt_token_ids: list[int]
    params: RequestParams
    seed: int  # 0 to 2**64 - 1: params.seed, or derived from the engine's
    eos_token_ids: list[int] = []  # empty where params.ignore_eos
    cache_salt: str = ""  # requests share cached prefixes only if their salts are equal


class SampleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample the token that follows a chunk."""

    params: RequestParams
    seed: int
    position: int  # number of output tokens before it; (seed, position) determines a random choice
    barred_token_ids: list[int] = []  # stop tokens, while below min_tokens
    prompt_token_ids: list[int] = []  # empty unless params.has_penalties
    output_token_ids: list[int] = []  # empty unless params.has_penalties


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one request that one step computes: a part of its prompt, or its newest token."""

    token_ids: list[int]
    start: int  # position of the first of them in the request
    block_ids: list[int]  # KV blocks of positions 0 to start + len(token_ids) - 1
    sample: SampleSpec | None = None  # None: more of the prompt follows
    num_prompt_logprobs: int | None = None
    prompt_targets: list[int] = []  # tokens that rows 0, 1, ... predict; empty unless num_prompt_logprobs is set


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one replica in one step. Ranks keep no state of a request between steps."""

    step: int
    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def is_decode_only(self) -> bool:
        """True if each request computes one token."""
        return all(len(chunk.token_ids) == 1 for chunk in self.chunks)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: first of the sampled or given token, then of the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]  # 1: the most likely


class ChunkResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one chunk."""

    token_id: int | None = None  # the token that follows it, if one was sampled
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = []  # one per prompt target


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one step, chunk by chunk in the order of the plan."""

    step: int
    chunks: list[ChunkResult]
    load: LoadWindow | None = None  # of earlier steps, if a collection was agreed
    placement_epoch: int = 0  # the newest expert placement whose weights this rank holds


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a request after a step, or its end."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []  # complete, once, with the first token
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it; None for the end-of-sequence token
    num_cached_tokens: int = 0  # prompt tokens whose keys and values came from the prefix cache
    error: str | None = None  # why it ended early; finish_reason is then "abort"


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Message to a replica: serve this request. Its id is never used by another request."""

    request: Request


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """Message to a replica: end this request now. Ignored if it has ended already."""

    request_id: str


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Message to a replica: another one has work. It shortens the wait for the heartbeat; nothing depends on it."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """The last message to every replica: end all requests, and stop together."""


class CollectLoad(msgspec.Struct, frozen=True, tag="collect-load"):
    """Message to the first replica: collect the expert loads of all ranks now."""


ReplicaMessage: TypeAlias = AddRequest | AbortRequest | Wake | CollectLoad | Shutdown


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a replica, for the router and for metrics."""

    num_free_blocks: int  # of KV cache, including those that the prefix cache uses
    num_waiting: int  # requests
    num_running: int  # requests
    step: int  # agreements made so far; grows even while all replicas idle
