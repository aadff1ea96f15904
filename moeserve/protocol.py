"""Messages between the control plane and the ranks: requests, step plans, step results.

Plain data only: token ids and block ids are Python integers, never tensors.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from moeserve.cache_kind import CacheKind
from moeserve.controls import INITIAL_VERSION, Control, ControlResult
from moeserve.outputs import FinishReason
from moeserve.sampling_params import RequestParams
from moeserve.telemetry.expert_load import LoadWindow
from moeserve.telemetry.step_totals import StepTotals


class Sample(msgspec.Struct, frozen=True):
    """An additional output of a prompt: a request that differs from the prompt's first request only in these values."""

    request_id: str
    seed: int


class PeerBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The first blocks of a prompt in the KV cache of another engine, which keeps them for a limited time."""

    handle: str  # name of the blocks in that engine, random so that it cannot be guessed
    addresses: list[str]  # "host:port" of each rank of the replica that has the blocks, in order
    num_blocks: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. A prompt with `n` > 1 becomes n requests."""

    request_id: str
    prompt_token_ids: list[int]
    params: RequestParams
    seed: int  # 0 to 2**64 - 1: params.seed, or derived from the engine's seed
    eos_token_ids: list[int] = []  # empty if params.ignore_eos
    cache_salt: str = ""  # requests share cached prefixes only if their salts are equal
    output_token_ids: list[int] = []  # tokens generated elsewhere; the request continues after them
    kv_handle: str = ""  # if not empty, the prompt's blocks are kept under this name for another engine
    kv_source: PeerBlocks | None = None  # the prompt's blocks, if another engine has computed them
    forced_routes: bytes = b""  # the experts of the first tokens, if they are forced; see `RouteShape`

    def resampled(self, sample: Sample) -> Request:
        """Return the request of an additional output. It shares the prompt, without prompt log-probabilities."""
        params = self.params
        if params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(self, request_id=sample.request_id, seed=sample.seed, params=params)


class CacheStart(msgspec.Struct, frozen=True, array_like=True):
    """The part of the caches that a request holds when it is registered."""

    tables: list[list[int]]  # block ids, by group of layers; arbitrary for blocks that the request no longer reads
    row: int | None = None  # row of the recurrent state before the next token; None: the state starts as zeros


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The initial state of a running request, which is kept by every rank of its replica.

    The ranks then append the blocks in each plan. If the scheduler plans before earlier tokens are known, the ranks
    append the tokens that they sample themselves; otherwise they append the tokens in each plan.
    """

    slot: int  # index in the ranks' tables; replaces the previous request in this slot
    token_ids: list[int]  # prompt and output; with `prompt_slot`, only the output
    num_prompt_tokens: int
    prompt_slot: int | None = None  # slot of a registered request with the same prompt
    cache: CacheStart
    params: RequestParams
    seed: int
    end_token_ids: list[int]  # excluded from sampling until the output has params.min_tokens tokens
    forced_routes: bytes = b""  # see `Request`


class SavedState(msgspec.Struct, frozen=True, array_like=True):
    """A copy of a request's recurrent state within or after a chunk, for later requests with the same prefix.

    If the chunk has drafts, the state before the drafts is copied, and is restored if a draft is rejected.
    """

    slot: int
    row: int  # row of the state caches
    num_tokens: int  # tokens of the chunk that the copy includes, at least one


class CacheChanges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The changes of a plan to the ranks' tables of registered requests, besides their tokens."""

    new_blocks: list[tuple[int, list[list[int]]]] = []  # slots, and by group the blocks to append to the slots' tables
    moved_rows: list[tuple[int, int]] = []  # slots, and the new row of their request's state
    saved_states: list[SavedState] = []


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one replica in one step: chunks of tokens of registered requests, one chunk for each request.

    A chunk that reaches the last token known to the ranks, including sampled tokens, samples the next token. It may
    continue with drafts, which are guesses of the next tokens; then it also samples after each draft.
    """

    step: int
    slots: list[int]  # slot of each chunk's request
    starts: list[int]  # position of each chunk's first token in its request
    lengths: list[int]  # tokens of each chunk, including drafts
    num_sampling: int = 0  # number of chunks that sample
    registrations: list[Registration] = []
    cache: CacheChanges = CacheChanges()
    new_tokens: list[tuple[int, list[int]]] = []  # slots, and the tokens to append to their requests
    drafts: list[tuple[int, list[int]]] = []  # slots, and the drafts at the end of their chunks

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def is_decode_only(self) -> bool:
        """True if every chunk has one token."""
        return self.num_tokens == len(self.lengths)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position, first of the sampled or given token, then of the most likely tokens."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]  # ranks by probability; 1: the most likely token


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

    token_ids: list[int] = []  # accepted drafts, and the token after them; empty if the chunk does not sample
    logprobs: list[TokenLogprobs] = []  # log-probabilities of each of these tokens, if requested
    draft_token_ids: list[int] = []  # drafts of the tokens that follow, for a later plan
    prompt_logprobs: list[LogprobRows] = []  # together one row for each prompt token that the chunk predicts
    error: str | None = None  # reason why the request cannot continue, such as logits of NaN


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one step, chunk by chunk in the order of the plan."""

    step: int
    chunks: list[ChunkResult]
    load: LoadWindow | None = None  # expert loads of earlier steps, if the replicas agreed on a collection


class CachePlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of an item in the KV cache of each rank."""

    kind: CacheKind
    index: int  # among the places of this kind


# The name of an item in a store behind the KV cache: its index there, or the name of its file.
StoreKey: TypeAlias = int | str
# The number of tokens and of blocks of a request, and a checksum of both. See `scheduling/rank_state.py`.
RequestDigest: TypeAlias = tuple[int, int, int]


class StoreTransfer(msgspec.Struct, frozen=True, kw_only=True, tag="transfer"):
    """Command to copy items of the KV cache to or from the store behind it. Sent to every rank of a replica.

    During the transfer, plans do not use places that it writes, and do not write places that it reads.
    """

    number: int  # number of the transfer, in the order of sending
    is_load: bool  # True: from the store to the cache; False: from the cache to the store
    places: list[CachePlace]  # places in the cache
    store_keys: list[StoreKey]  # keys of the same items in the store
    routes: bytes = b""  # experts of the tokens to save, if routes are returned; see `RouteStore.read_blocks`


class KeepItems(msgspec.Struct, frozen=True, kw_only=True, tag="keep"):
    """Command to keep items of the KV cache until another engine has read them or `kv_transfer_timeout` has passed.

    Sent to every rank of a replica.
    """

    number: int  # number of the transfer, as in `StoreTransfer`
    handle: str  # name under which the items can be read
    tokens: bytes  # digest of the tokens that the items belong to
    places: list[CachePlace]  # all items that a request needs to continue after these tokens, in the order of its cache
    routes: bytes = b""  # as in `StoreTransfer`


class ReceiveItems(msgspec.Struct, frozen=True, kw_only=True, tag="receive"):
    """Command to read items of another engine into the KV cache, and to free them there.

    Sent to every rank of a replica.
    """

    number: int  # number of the transfer, as in `StoreTransfer`
    receiver: str  # random name of this transfer, the same on all ranks
    source: PeerBlocks
    tokens: bytes  # digest of the tokens that the items of the source must belong to
    wanted: list[int]  # the source's items to read, as indices in `KeepItems.places`
    places: list[CachePlace]  # places in this cache to which these items are written; empty: nothing is read


class CancelReceive(msgspec.Struct, frozen=True, kw_only=True, tag="cancel-receive"):
    """Command to end a `ReceiveItems` early, because no request needs its items. Sent to every rank of a replica.

    The command counts as a transfer that ends at once. The cancelled transfer ends when its places are no longer
    written.
    """

    number: int  # number of the transfer, as in `StoreTransfer`
    receive: int  # number of the transfer to cancel, which may have ended already


Transfer: TypeAlias = StoreTransfer | KeepItems | ReceiveItems | CancelReceive


class TransferResult(msgspec.Struct, frozen=True, kw_only=True, tag="transferred"):
    """Report of the end of a transfer on one rank, or on all ranks of a replica."""

    number: int
    num_copied: int  # number of leading items that were copied; fewer than all if an item could not be copied
    seconds: float
    routes: bytes = b""  # experts of the tokens in the blocks that were loaded or received, if routes are returned


class RouteRows(msgspec.Struct, frozen=True, kw_only=True):
    """The experts that computed a rank's rows of one step, in the layers of its pipeline stage; see `RouteShape`."""

    first_layer: int
    rows: bytes  # [rows, layers of the stage, top_k]


class RankReport(msgspec.Struct, frozen=True):
    """The report of one rank after a round, if `EngineConfig.gathers_reports`."""

    rank: int
    digests: list[RequestDigest] = []  # with `debug_rank_state`: digest of each chunk's request in the plan
    routes: RouteRows | None = None  # None: routes are not reported, or there was no step


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a request after a step, or the end of the request."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[LogprobRows] = []  # rows of all prompt tokens, sent once with the first token
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended the request; None for the end-of-sequence token
    num_cached_tokens: int = 0  # prompt tokens whose keys and values came from the prefix cache
    error: str | None = None  # reason why the request ended early; finish_reason is then "abort"
    replica: int = 0  # index of the replica that runs the request
    weight_version: str = INITIAL_VERSION  # version of the weights that computed the tokens
    kv_blocks: PeerBlocks | None = None  # the blocks kept for another engine, sent at the end of the request
    routes: bytes = b""  # experts of the tokens computed since the last update; see `RouteShape`


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Message to a replica: serve a request and additional samples of it. Their ids are never reused."""

    request: Request
    samples: list[Sample] = []

    @property
    def requests(self) -> list[Request]:
        """All requests of the message. They share one prompt in memory."""
        return [self.request, *map(self.request.resampled, self.samples)]


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """Message to a replica: abort a request. Ignored if the request has ended."""

    request_id: str


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Message to a replica: another replica has work. The message only shortens the wait for the next heartbeat."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """The last message to every replica: end all requests, and stop together with the other replicas."""


class CollectLoad(msgspec.Struct, frozen=True, tag="collect-load"):
    """Message to the first replica: collect the expert loads of all ranks now."""


ReplicaMessage: TypeAlias = AddRequest | AbortRequest | Wake | CollectLoad | Control | Shutdown


class SpeculationTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of drafts since the start of a replica."""

    num_drafts: int = 0  # number of drafts; a draft is the run of draft tokens of one chunk
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # number of accepted draft tokens
    # For each position in a run, the number of runs whose draft token at this position was accepted.
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

    num_free_blocks: int  # KV cache blocks, including those that the prefix cache uses
    num_waiting: int  # requests
    num_running: int  # requests
    num_rounds: int  # completed rounds; increases even while all replicas are idle
    num_preemptions: int = 0  # total so far
    speculation: SpeculationTotals = SpeculationTotals()
    steps: StepTotals = msgspec.field(default_factory=StepTotals)
    num_loaded_tokens: int = 0  # tokens whose keys and values were loaded from the store behind the KV cache
    num_loaded_states: int = 0  # recurrent states loaded from this store
    num_saved_blocks: int = 0  # blocks saved to this store
    num_saved_states: int = 0
    num_failed_blocks: int = 0  # blocks and states whose loading or saving failed, or that no engine has read in time


class Delivery(msgspec.Struct, frozen=True, tag="delivery"):
    """A message of a replica: updates of requests, its load, and controls that have run.

    Messages of the first replica may also have expert loads.
    """

    updates: list[RequestUpdate]
    stats: ReplicaStats
    load: LoadWindow | None = None
    answers: bool = False  # `load` answers a CollectLoad
    controls: list[ControlResult] = []  # controls that have run
