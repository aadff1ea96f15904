"""Messages between the control plane and the ranks: requests, step plans, step results.

Plain data only: token ids and block ids are Python integers, never tensors.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from moeserve.outputs import FinishReason
from moeserve.sampling_params import RequestParams
from moeserve.telemetry.expert_load import LoadWindow
from moeserve.telemetry.step_totals import StepTotals


class Sample(msgspec.Struct, frozen=True):
    """A further output of a prompt: a request that differs from the first one only in these values."""

    request_id: str
    seed: int


class PeerBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The first blocks of a prompt in the KV cache of another engine, which keeps them for a while."""

    handle: str  # their name there, which nobody can guess
    addresses: list[str]  # "host:port" of each rank of the replica that has them, in order
    num_blocks: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. A prompt with `n` > 1 becomes n requests."""

    request_id: str
    prompt_token_ids: list[int]
    params: RequestParams
    seed: int  # 0 to 2**64 - 1: params.seed, or derived from the engine's
    eos_token_ids: list[int] = []  # empty where params.ignore_eos
    cache_salt: str = ""  # requests share cached prefixes only if their salts are equal
    output_token_ids: list[int] = []  # generated elsewhere before: the request continues after them
    kv_handle: str = ""  # if not empty, the prompt's blocks are kept under this name for another engine
    kv_source: PeerBlocks | None = None  # where the prompt's blocks are, if another engine has computed them

    def resampled(self, sample: Sample) -> Request:
        """Return the request of a further output. It shares the prompt, and computes no prompt log-probabilities."""
        params = self.params
        if params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(self, request_id=sample.request_id, seed=sample.seed, params=params)


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a running request that every rank of its replica keeps, as it is when the request is admitted.

    From then on the ranks append blocks that plans name, and tokens: those that they sample, or, where the scheduler
    does not plan ahead of tokens, those that plans name.
    """

    slot: int  # of the ranks' table; whatever was there before is forgotten
    token_ids: list[int]  # prompt and output; with `prompt_slot`, the output alone
    num_prompt_tokens: int
    prompt_slot: int | None = None  # of a request registered before, which has the same prompt
    block_ids: list[int]
    window_block_ids: list[int] = []  # of layers with windows, as many; any block behind the window
    params: RequestParams
    seed: int
    end_token_ids: list[int]  # excluded from sampling while below params.min_tokens
    state_row: int | None = None  # of the recurrent state before its next token; None: it starts with zeros


class SavedState(msgspec.Struct, frozen=True, array_like=True):
    """A copy of a request's recurrent state within or after a chunk, for later requests with the same prefix.

    If the chunk has drafts, it is the state before them, to which the request returns if one of them is rejected.
    """

    slot: int
    row: int  # of the state caches
    num_tokens: int  # of the chunk, at least one, before the copy


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one replica in one step: chunks of tokens of registered requests, one chunk for each request.

    A chunk that ends at the last token that the ranks know, sampled ones included, samples the next token. Drafts,
    which guess this token and those after it, may follow; the chunk then samples after each of them too.
    """

    step: int
    slots: list[int]  # the request of each chunk
    starts: list[int]  # position of each chunk's first token in its request
    lengths: list[int]  # tokens of each chunk, drafts included
    num_sampling: int = 0  # chunks that sample
    registrations: list[Registration] = []
    new_blocks: list[tuple[int, list[int]]] = []  # slots, and the KV blocks that are appended to their requests'
    new_window_blocks: list[tuple[int, list[int]]] = []  # the same of layers with windows
    new_tokens: list[tuple[int, list[int]]] = []  # slots, and the tokens that are appended to their requests'
    drafts: list[tuple[int, list[int]]] = []  # slots, and the drafts at the end of their chunks
    moved_states: list[tuple[int, int]] = []  # slots, and the row where the state of their request is from now on
    saved_states: list[SavedState] = []

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def is_decode_only(self) -> bool:
        """True if each request computes one token."""
        return self.num_tokens == len(self.lengths)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: first of the sampled or given token, then of the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]  # 1: the most likely


class LogprobRows(msgspec.Struct, frozen=True):
    """Log-probabilities at consecutive positions of a prompt: `TokenLogprobs` packed as a table of 12 bytes per entry.

    Each column is an array in the byte order of the machine: token ids and ranks as int32, log-probabilities as
    float32, [positions, tokens per position].
    """

    num_rows: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes

    def row(self, index: int) -> TokenLogprobs:
        """Return the log-probabilities at one position."""
        width = len(self.token_ids) // 4 // self.num_rows
        row = slice(index * width, (index + 1) * width)
        return TokenLogprobs(
            memoryview(self.token_ids).cast("i")[row].tolist(),
            list(memoryview(self.logprobs).cast("f")[row]),
            memoryview(self.ranks).cast("i")[row].tolist(),
        )


class ChunkResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one chunk."""

    token_ids: list[int] = []  # the accepted drafts, and the token after them; empty if the chunk does not sample
    logprobs: list[TokenLogprobs] = []  # of each of these, if they are wanted
    draft_token_ids: list[int] = []  # guesses of the tokens that follow, for a later plan
    prompt_logprobs: list[LogprobRows] = []  # together one row for each prompt token that a row of the chunk predicts
    error: str | None = None  # why its request cannot go on, for example because its logits are NaN


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one step, chunk by chunk in the order of the plan."""

    step: int
    chunks: list[ChunkResult]
    load: LoadWindow | None = None  # of earlier steps, if a collection was agreed


class CacheKind(enum.IntEnum):
    """The kinds of items in a KV cache. All items of a kind have one size, and places of their own in the cache."""

    BLOCK = 0  # of layers that keep all tokens
    WINDOW_BLOCK = 1  # of layers with windows
    STATE = 2  # a saved copy of a recurrent state


class CachePlace(msgspec.Struct, frozen=True, array_like=True):
    """Where an item lies in the KV cache of each rank."""

    kind: CacheKind
    index: int  # among the places of this kind


# How a store behind the KV cache names an item: by its place there, or by the name of its file.
StoreKey: TypeAlias = int | str
# The number of tokens and of blocks of a request, and a checksum of both. See `scheduling/rank_state.py`.
RequestDigest: TypeAlias = tuple[int, int, int]


class StoreTransfer(msgspec.Struct, frozen=True, kw_only=True, tag="transfer"):
    """A copy of items of the KV cache to or from the store behind it. Sent to every rank of a replica.

    No plan names the places that are written meanwhile, nor are places written that are read.
    """

    number: int  # of the transfer, in the order in which they are sent
    is_load: bool  # from the store to the cache; False: the other way
    places: list[CachePlace]  # in the cache
    store_keys: list[StoreKey]  # of the same items in the store


class KeepItems(msgspec.Struct, frozen=True, kw_only=True, tag="keep"):
    """Keep items of the KV cache until another engine has read them, or for as long as `kv_transfer_timeout`.

    Sent to every rank of a replica.
    """

    number: int  # of the transfer, as in `StoreTransfer`
    handle: str  # the name under which they can be read
    tokens: bytes  # digest of the tokens that they belong to
    places: list[CachePlace]  # all that a request needs to begin behind these tokens, in the order of its cache


class ReceiveItems(msgspec.Struct, frozen=True, kw_only=True, tag="receive"):
    """Read items from another engine into the KV cache, and set them free there. Sent to every rank of a replica."""

    number: int  # of the transfer, as in `StoreTransfer`
    receiver: str  # random name of this transfer, the same for all ranks
    source: PeerBlocks
    tokens: bytes  # digest of the tokens that the items of the source must belong to
    wanted: list[int]  # the source's items that are read, by their index in `KeepItems.places`
    places: list[CachePlace]  # of the same items in this cache, to be written; empty: nothing is read


class CancelReceive(msgspec.Struct, frozen=True, kw_only=True, tag="cancel-receive"):
    """End a `ReceiveItems` early: no request needs its items any more. Sent to every rank of a replica.

    It is a transfer too, which ends at once. The one that it cancels ends when nothing is written into its places.
    """

    number: int  # of the transfer, as in `StoreTransfer`
    receive: int  # number of the transfer that is cancelled; it may have ended


Transfer: TypeAlias = StoreTransfer | KeepItems | ReceiveItems | CancelReceive


class TransferOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="transferred"):
    """The end of a transfer: on one rank, or on all ranks of a replica."""

    number: int
    num_copied: int  # items from the first on; fewer than all if one could not be copied
    seconds: float


class RankReport(msgspec.Struct, frozen=True):
    """The state of one rank after a round, for the debug check."""

    rank: int
    digests: list[RequestDigest]  # of the requests of the plan, chunk by chunk


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a request after a step, or its end."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[LogprobRows] = []  # complete, once, with the first token
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it; None for the end-of-sequence token
    num_cached_tokens: int = 0  # prompt tokens whose keys and values came from the prefix cache
    error: str | None = None  # why it ended early; finish_reason is then "abort"
    replica: int = 0  # index of the one that runs the request
    kv_blocks: PeerBlocks | None = None  # that are kept for another engine, with the end of the request


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Message to a replica: serve a request, and further samples of it. Their ids are never used by other requests."""

    request: Request
    samples: list[Sample] = []

    @property
    def requests(self) -> list[Request]:
        """All requests of the message. They share one prompt in memory."""
        return [self.request, *map(self.request.resampled, self.samples)]


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


class SpeculationTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of drafts since the start of a replica."""

    num_drafts: int = 0  # runs of draft tokens, each in one chunk
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of these
    # For each place in a run, the runs whose draft token at this place was accepted.
    num_accepted_per_position: tuple[int, ...] = ()

    def after(self, num_draft_tokens: int, num_accepted_tokens: int) -> SpeculationTotals:
        """Return the counts after another run of draft tokens."""
        counts = self.num_accepted_per_position
        counts += (0,) * (num_draft_tokens - len(counts))
        return SpeculationTotals(
            num_drafts=self.num_drafts + 1,
            num_draft_tokens=self.num_draft_tokens + num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + num_accepted_tokens,
            num_accepted_per_position=tuple(
                count + (position < num_accepted_tokens) for position, count in enumerate(counts)
            ),
        )


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a replica, for the router and for metrics."""

    num_free_blocks: int  # of KV cache, including those that the prefix cache uses
    num_waiting: int  # requests
    num_running: int  # requests
    num_rounds: int  # that have ended; grows even while all replicas idle
    num_preemptions: int = 0  # so far
    speculation: SpeculationTotals = SpeculationTotals()
    steps: StepTotals = msgspec.field(default_factory=StepTotals)
    num_loaded_tokens: int = 0  # whose keys and values came from the store behind the KV cache, so far
    num_loaded_states: int = 0  # recurrent states that came from there
    num_saved_blocks: int = 0  # to this store
    num_saved_states: int = 0
    num_failed_blocks: int = (
        0  # and states, that could not be loaded or saved, or that no other engine has read in time
    )
