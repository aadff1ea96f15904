"""The runtime state of one request: its tokens and its progress."""

from __future__ import annotations

from dataclasses import dataclass, field

from moeserve.kv.requests import RequestCache
from moeserve.outputs import FinishReason
from moeserve.protocol import CacheStart, LogprobRows, PeerBlocks, Registration, Request, RequestUpdate, TokenLogprobs

NO_SLOT = -1  # slot of a request that is not running


@dataclass(eq=False)
class LiveRequest:
    """A request that has not ended or is still in a plan in flight. Only the scheduler changes this object."""

    request: Request
    arrival: int  # number of requests that arrived before this one
    cache: RequestCache
    token_ids: list[int] = field(init=False)  # tokens known to the scheduler: prompt, then output
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_planned: int = 0  # computed tokens, and tokens of plans in flight
    num_unknown: int = 0  # output tokens that plans in flight sample
    num_plans: int = 0  # plans in flight that include the request
    slot: int = NO_SLOT  # index in the ranks' tables
    is_registered: bool = False  # the ranks' tables hold the request's state
    num_sent: int = 0  # known tokens when last planned; ranks have these unless they append their own samples
    draft_token_ids: list[int] = field(default_factory=list)  # drafts for the next plan
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache at the first admission
    num_passed: int = 0  # number of later requests that were admitted before this one
    may_load: bool = True  # may load blocks from a store behind the cache; once per admission
    turn: int | None = None  # number of the last turn; None: the request has had no turn (`turns.py`)
    kv_source: PeerBlocks | None = field(init=False)  # blocks to receive before admission
    ended: bool = False
    _prompt_logprobs: list[LogprobRows] = field(default_factory=list)  # collected until the first token

    def __post_init__(self) -> None:
        self.kv_source = self.request.kv_source
        self.token_ids = self.request.prompt_token_ids  # samples share this list until they have output tokens
        if self.request.output_token_ids:
            self.token_ids = self.request.prompt_token_ids + self.request.output_token_ids

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_unplanned(self) -> int:
        """Number of tokens that are not in any plan yet, including those that plans in flight will sample."""
        return len(self.token_ids) + self.num_unknown - self.num_planned

    @property
    def is_prefilling(self) -> bool:
        """True if several tokens must be planned before the next one is sampled."""
        return self.num_unplanned > 1

    @property
    def needs_every_prompt_row(self) -> bool:
        """True until the prompt log-probabilities have been sent. Until then, no prompt position may be skipped."""
        return self.request.params.prompt_logprobs is not None and self.num_output_tokens == 0

    def num_left(self, max_model_len: int) -> int:
        """Return the maximum number of tokens after the known tokens and the tokens that plans in flight sample."""
        num_tokens, max_tokens = len(self.token_ids) + self.num_unknown, self.request.params.max_tokens
        num_left = max_model_len - num_tokens
        return num_left if max_tokens is None else min(num_left, self.num_prompt_tokens + max_tokens - num_tokens)

    def registration(self, cache: CacheStart, prompt_slot: int | None) -> Registration:
        """Return the registration for the ranks. The request must not be in any plan in flight.

        Args:
            cache: the blocks and the state of the request.
            prompt_slot: slot of a registered request with the same prompt, or None.
        """
        assert self.slot != NO_SLOT, self.request_id
        assert self.num_plans == 0, self.request_id
        request = self.request
        return Registration(
            slot=self.slot,
            token_ids=self.token_ids if prompt_slot is None else self.token_ids[self.num_prompt_tokens :],
            num_prompt_tokens=self.num_prompt_tokens,
            prompt_slot=prompt_slot,
            cache=cache,
            params=request.params,
            seed=request.seed,
            end_token_ids=[*request.eos_token_ids, *request.params.stop_token_ids],
            forced_routes=request.forced_routes,
        )

    def collect_prompt_logprobs(self, rows: list[LogprobRows]) -> None:
        self._prompt_logprobs += rows

    def append(self, token_ids: list[int], logprobs: list[TokenLogprobs], max_model_len: int) -> RequestUpdate:
        """Add sampled tokens up to the token that ends the request.

        Return the update for the client, whose `finish_reason` is set if the request has ended.
        """
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        if self.token_ids is self.request.prompt_token_ids:
            self.token_ids = self.token_ids.copy()
        num_before = len(self.token_ids)
        finish_reason: FinishReason | None = None
        stop_reason: int | None = None
        for token_id in token_ids:
            finish_reason, stop_reason = self._finish_and_stop_reason(token_id, max_model_len)
            self.token_ids.append(token_id)
            if finish_reason is not None:
                break
        added = self.token_ids[num_before:]
        return RequestUpdate(
            request_id=self.request_id,
            token_ids=added,
            logprobs=logprobs[: len(added)],
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=self.num_cached_tokens or 0,
        )

    def _finish_and_stop_reason(self, token_id: int, max_model_len: int) -> tuple[FinishReason | None, int | None]:
        """Return finish_reason (None to continue) and stop_reason if `token_id` is the next token."""
        request, params = self.request, self.request.params
        if self.num_output_tokens >= params.min_tokens:
            if token_id in request.eos_token_ids:
                return "stop", None
            if token_id in params.stop_token_ids:
                return "stop", token_id
        if self.num_output_tokens + 1 == params.max_tokens or len(self.token_ids) + 1 == max_model_len:
            return "length", None
        return None, None

    def aborted(self, error: str | None = None) -> RequestUpdate:
        """Return the update for the client after the request was ended, because of an error if one is given."""
        return RequestUpdate(
            request_id=self.request_id,
            finish_reason="abort",
            num_cached_tokens=self.num_cached_tokens or 0,
            error=error,
        )

    def reset_computed(self) -> None:
        """Reset the progress after a preemption. The output is kept, and all tokens will be computed again."""
        self.num_computed = self.num_planned = 0
        self.slot = NO_SLOT
        self.draft_token_ids = []
        self.is_registered = False
        self.may_load = True
        self._prompt_logprobs = []  # not sent yet, so all will be computed again
