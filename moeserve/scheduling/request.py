"""The runtime state of one request: its tokens, how many of them are computed, and the blocks it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from moeserve.outputs import FinishReason
from moeserve.protocol import Chunk, Request, RequestUpdate, SampleSpec, TokenLogprobs
from moeserve.scheduling.block_pool import block_digests


@dataclass(eq=False)
class LiveRequest:
    """A request that has not ended. Only the scheduler changes it."""

    request: Request
    arrival: int  # number of requests that came before it
    root_digest: bytes
    token_ids: list[int] = field(init=False)  # prompt, then output
    num_computed: int = 0  # tokens whose keys and values are in the cache
    block_ids: list[int] = field(default_factory=list)  # replaced, never changed: plans share it
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache when it was first admitted
    ended: bool = False
    _digests: list[bytes] = field(default_factory=list)  # of its first full blocks, computed on demand
    _prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # collected until the first token

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)

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
    def num_uncomputed(self) -> int:
        """Known tokens that are not in the cache: at least one, because the newest is computed a step later."""
        return len(self.token_ids) - self.num_computed

    @property
    def needs_every_prompt_row(self) -> bool:
        """True until the prompt log-probabilities are sent: no position of the prompt may then be skipped."""
        return self.request.params.prompt_logprobs is not None and self.num_output_tokens == 0

    def digest(self, block_index: int, block_size: int) -> bytes:
        """Return the digest of a full block of known tokens. Each is computed once."""
        assert (block_index + 1) * block_size <= len(self.token_ids), f"block {block_index} is not full"
        if block_index >= len(self._digests):
            parent = self._digests[-1] if self._digests else self.root_digest
            known = self.token_ids[len(self._digests) * block_size :]
            self._digests += block_digests(parent, known, block_size)
        return self._digests[block_index]

    def next_chunk(self, num_tokens: int) -> Chunk:
        """Return the next `num_tokens` tokens to compute. If they include the last known one, a token is sampled."""
        start, end = self.num_computed, self.num_computed + num_tokens
        needs_rows = self.needs_every_prompt_row
        return Chunk(
            token_ids=self.token_ids[start:end],
            start=start,
            block_ids=self.block_ids,
            sample=self._sample_spec() if end == len(self.token_ids) else None,
            num_prompt_logprobs=self.request.params.prompt_logprobs if needs_rows else None,
            # row p predicts token p + 1; the token after the prompt is sampled, not given
            prompt_targets=self.token_ids[start + 1 : end + 1] if needs_rows else [],
        )

    def _sample_spec(self) -> SampleSpec:
        request, params = self.request, self.request.params
        has_penalties = params.has_penalties
        return SampleSpec(
            params=params,
            seed=request.seed,
            position=self.num_output_tokens,
            barred_token_ids=[*request.eos_token_ids, *params.stop_token_ids] if self._is_below_min_tokens else [],
            prompt_token_ids=request.prompt_token_ids if has_penalties else [],
            output_token_ids=self.token_ids[self.num_prompt_tokens :] if has_penalties else [],
        )

    @property
    def _is_below_min_tokens(self) -> bool:
        return self.num_output_tokens < self.request.params.min_tokens

    def collect_prompt_logprobs(self, rows: list[TokenLogprobs]) -> None:
        self._prompt_logprobs += rows

    def append(self, token_id: int, logprobs: TokenLogprobs | None, max_model_len: int) -> RequestUpdate:
        """Add a sampled token. Return the update for the client, whose `finish_reason` is set if it was the last."""
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        finish_reason, stop_reason = self._finish_and_stop_reason(token_id, max_model_len)
        self.token_ids.append(token_id)
        return RequestUpdate(
            request_id=self.request_id,
            token_ids=[token_id],
            logprobs=[] if logprobs is None else [logprobs],
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=self.num_cached_tokens or 0,
        )

    def _finish_and_stop_reason(self, token_id: int, max_model_len: int) -> tuple[FinishReason | None, int | None]:
        """Return finish_reason (None to continue) and stop_reason if `token_id` is the next token."""
        request, params = self.request, self.request.params
        if not self._is_below_min_tokens:
            if token_id in request.eos_token_ids:
                return "stop", None
            if token_id in params.stop_token_ids:
                return "stop", token_id
        if self.num_output_tokens + 1 == params.max_tokens or len(self.token_ids) + 1 == max_model_len:
            return "length", None
        return None, None

    def reset_computed(self) -> None:
        """Return to the start after a preemption. The output is kept; all tokens will be computed again."""
        self.num_computed = 0
        self.block_ids = []
        self._prompt_logprobs = []  # not sent yet, so all of them will be computed again
