"""`Frontend`: turns prompts into requests, and the engine's updates into outputs, without I/O."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeAlias

from moeserve.api.logprobs import PromptLogprobs, logprob_of_token
from moeserve.api.output_text import OutputText
from moeserve.api.prompts import EncodedPrompt, Params, PromptEncoder, Prompts, pair_prompts
from moeserve.api.routes import OutputRoutes, Routes
from moeserve.api.tokenizer import TextCodec
from moeserve.config.routes import RouteShape
from moeserve.errors import RequestError
from moeserve.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, WeightSpan
from moeserve.protocol import PeerBlocks, Request, RequestUpdate, Sample
from moeserve.sampling_params import RANDOM_SEED, KvTransferParams, RequestOutputKind, SamplingParams
from moeserve.telemetry.request_stats import RequestStats
from moeserve.worker.grammars import Grammars


@dataclass(frozen=True)
class Submission:
    """The requests of one prompt."""

    prompt_id: str
    request: Request  # the request of the first output
    samples: list[Sample]  # the other outputs


EncodedPrompts: TypeAlias = list[tuple[EncodedPrompt, SamplingParams]]


class Frontend:
    """The prompts in flight. Not thread-safe: `Session` holds a lock."""

    def __init__(
        self,
        codec: TextCodec | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        engine_seed: int,
        num_replicas: int = 1,
        grammars: Grammars | None = None,
        kv_block_size: int | None = None,
        routes: RouteShape | None = None,
    ) -> None:
        """
        Args:
            codec: None if there is no tokenizer; prompts are then token ids, and outputs have no text.
            vocab_size: number of tokens in the model's vocabulary.
            max_model_len: maximum tokens of a request, prompt and output together.
            eos_token_ids: tokens that end an output.
            engine_seed: seed from which a different seed is derived for each prompt without a seed.
            num_replicas: number of replicas, each of which has statistics.
            grammars: compiler for structured outputs; None: structured outputs are refused.
            kv_block_size: tokens per block exchanged with other engines; None: no blocks are exchanged.
            routes: shape of the routed experts that outputs return; None: outputs return none.
        """
        self._codec = codec
        self._encoder = PromptEncoder(
            codec,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            grammars=grammars,
            routes=routes,
        )
        self._routes = routes
        self._eos_token_ids = list(eos_token_ids)
        self._engine_seed = engine_seed
        self._kv_block_size = kv_block_size
        self._cache_generation = ""  # part of the salts of prompts since the last reset of the prefix cache
        self._num_prompts = 0
        self._prompts: dict[str, _PromptInFlight] = {}
        self._unfinished_prompts: set[str] = set()
        self._output_of_request: dict[str, tuple[_PromptInFlight, _OutputInFlight]] = {}  # unfinished requests only
        self.stats = [RequestStats() for _ in range(num_replicas)]  # by replica

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end an output."""
        return list(self._eos_token_ids)

    @property
    def unfinished_prompts(self) -> AbstractSet[str]:
        """The prompts that were submitted and have neither finished nor been discarded."""
        return self._unfinished_prompts

    @property
    def num_requests(self) -> int:
        """The number of unfinished outputs of unfinished prompts."""
        return len(self._output_of_request)

    def encode(self, prompts: Prompts, sampling_params: Params | Sequence[Params]) -> EncodedPrompts:
        """Check and tokenize one or many prompts, in order. Thread-safe: the state is not changed.

        Args:
            prompts: a `Prompt` or a list of them; a list of integers is one prompt.
            sampling_params: one `SamplingParams` for all prompts, or a list with one for each.

        Raises:
            RequestError: a prompt or a sampling parameter cannot be served.
        """
        pairs = pair_prompts(prompts, sampling_params)
        encoded = []
        for index, (prompt, params) in enumerate(pairs):
            # also parameters that only the engine that continues the output will use
            self._encoder.check_params(params)
            if _is_for_other_engine(params):
                params = params.for_prompt()
            name = "prompt" if len(pairs) == 1 else f"prompt {index}"
            encoded.append((self._encoder.encode(name, prompt, params.truncate_prompt_tokens), params))
            num_tokens = len(encoded[-1][0].token_ids)
            self._encoder.check_prompt_logprobs(name, num_tokens, params)
            if params.routed_experts_prompt_start >= num_tokens:
                raise RequestError(
                    f"routed_experts_prompt_start={params.routed_experts_prompt_start}, but {name} has {num_tokens} "
                    "tokens; it must be less",
                    parameter="routed_experts_prompt_start",
                )
            if params.kv_transfer is not None:
                self._check_kv_transfer(name, num_tokens, params.kv_transfer)
        return encoded

    def _check_kv_transfer(self, name: str, num_tokens: int, transfer: KvTransferParams) -> None:
        """Raise RequestError if this engine exchanges no blocks, or if the transfer has more blocks than the prompt."""
        if self._kv_block_size is None:
            raise RequestError(
                "kv_transfer_params are not supported, because this engine exchanges no keys and values with others; "
                "set kv_transfer_address",
                parameter="kv_transfer_params",
                code="unsupported_parameter",
            )
        if transfer.remote_num_blocks > num_tokens // self._kv_block_size:
            raise RequestError(
                f"remote_num_blocks={transfer.remote_num_blocks}, but the {num_tokens} tokens of {name} fill only "
                f"{num_tokens // self._kv_block_size} blocks of {self._kv_block_size}; both engines must get the same "
                "prompt and have the same block_size",
                parameter="kv_transfer_params",
            )

    def reset_prefix_cache(self) -> None:
        """Let later prompts use no blocks that were cached for earlier prompts."""
        self._cache_generation = f"{secrets.token_hex(16)}:"

    def check_params(self, params: SamplingParams) -> None:
        """Raise RequestError for sampling parameters that cannot be served. Thread-safe."""
        self._encoder.check_params(params)

    def check_conversation(self, text: str) -> None:
        """Raise RequestError for a rendered conversation that is too long for the model. Thread-safe."""
        self._encoder.check_length("the conversation", text)

    def register(self, prompts: EncodedPrompts, prompt_id: str | None = None) -> list[Submission]:
        """Create the requests of prompts, in order.

        Args:
            prompt_id: the id of the only prompt; None: create a new id for each prompt.

        Raises:
            RequestError: the id is in use.
        """
        if prompt_id in self._prompts:
            raise RequestError(f"request {prompt_id!r} is still being served; give each request an id of its own")
        return [self._register(prompt, params, prompt_id) for prompt, params in prompts]

    def update(self, update: RequestUpdate) -> bool:
        """Apply an engine's update to an unfinished request.

        Returns:
            True if the engine must abort the request, because its text contains a stop string.
        """
        prompt, output = self._output_of_request[update.request_id]
        if output.index == 0:
            prompt.update(update)
        output.update(update)
        self._note(prompt, output, update)
        if output.finish_reason is not None:
            del self._output_of_request[update.request_id]
            if prompt.finished:
                self._unfinished_prompts.discard(prompt.prompt_id)
        return output.finish_reason is not None and update.finish_reason is None

    def _note(self, prompt: _PromptInFlight, output: _OutputInFlight, update: RequestUpdate) -> None:
        """Add an update to the statistics of the replica that runs the request, or ran it last."""
        now = time.monotonic()
        if update.token_ids:
            output.replica = update.replica
        while len(self.stats) <= output.replica:  # replicas have been added since the start
            self.stats.append(RequestStats())
        stats = self.stats[output.replica]
        if update.token_ids:
            is_first = output.size[0] == len(update.token_ids)
            if is_first and output.index == 0:
                stats.note_prompt(prompt.num_tokens, update.num_cached_tokens)
            stats.note_tokens(len(update.token_ids), now - output.last_token_s, is_first=is_first)
            output.last_token_s = now
        if output.finish_reason is not None:
            stats.note_end(output.finish_reason, output.size[0], now - prompt.arrival_s)

    def output(self, prompt_id: str) -> RequestOutput:
        """Return all outputs of a prompt so far. The returned object is never modified."""
        return self._prompts[prompt_id].snapshot()

    def new_output(self, prompt_id: str) -> RequestOutput | None:
        """Return new output of a prompt since the last call; None if there is none.

        `output_kind` decides whether this is all output so far, only the new part, or the complete output at the end.
        """
        return self._prompts[prompt_id].new_output()

    def unfinished(self, prompt_id: str) -> list[str]:
        """Return the unfinished requests of a prompt; an empty list if there is no such prompt."""
        prompt = self._prompts.get(prompt_id)
        outputs = [] if prompt is None else prompt.outputs
        return [output.request_id for output in outputs if output.finish_reason is None]

    def prompt_of(self, request_id: str) -> str | None:
        """Return the id of a request's prompt; None if the request has ended."""
        found = self._output_of_request.get(request_id)
        return None if found is None else found[0].prompt_id

    def discard(self, prompt_id: str) -> None:
        """Remove a prompt. The engine must abort its unfinished requests, which are counted as aborted."""
        for request_id in self.unfinished(prompt_id):
            prompt, output = self._output_of_request.pop(request_id)
            seconds = time.monotonic() - prompt.arrival_s
            self.stats[output.replica].note_end("abort", output.size[0], seconds)
        del self._prompts[prompt_id]
        self._unfinished_prompts.discard(prompt_id)

    def _register(self, prompt: EncodedPrompt, params: SamplingParams, prompt_id: str | None) -> Submission:
        while prompt_id is None and str(self._num_prompts) in self._prompts:  # skip ids that callers have chosen
            self._num_prompts += 1
        number = self._num_prompts
        self._num_prompts += 1
        prompt_id = str(number) if prompt_id is None else prompt_id
        first, *samples = [
            Sample(
                # Not derived from the prompt's id: a new prompt may use that id before the engine has ended the old
                # requests.
                str(number) if params.n == 1 else f"{number}-{index}",
                _request_seed(params.seed, self._engine_seed, number, index),
            )
            for index in range(params.n)
        ]
        request = Request(
            request_id=first.request_id,
            prompt_token_ids=prompt.token_ids,
            params=self._encoder.engine_params(params),
            seed=first.seed,
            eos_token_ids=[] if params.ignore_eos or params.trace_decode_token_ids else self._eos_token_ids,
            cache_salt=self._cache_generation + prompt.cache_salt + _salt_of_routes(prompt.forced_routes),
            forced_routes=prompt.forced_routes,
            kv_handle=secrets.token_hex(16) if _is_for_other_engine(params) else "",
            kv_source=_source(params),
        )
        codec = self._codec if params.detokenize else None
        outputs = [
            _OutputInFlight(each.request_id, index, params, codec, self._output_routes(prompt, params))
            for index, each in enumerate([first, *samples])
        ]
        in_flight = _PromptInFlight(prompt_id, prompt, params, outputs, codec)
        self._prompts[prompt_id] = in_flight
        self._unfinished_prompts.add(prompt_id)
        self._output_of_request.update({output.request_id: (in_flight, output) for output in outputs})
        return Submission(prompt_id, request, samples)

    def _output_routes(self, prompt: EncodedPrompt, params: SamplingParams) -> OutputRoutes | None:
        if self._routes is None:
            return None
        return OutputRoutes(self._routes, len(prompt.token_ids) - params.routed_experts_prompt_start)


class _OutputInFlight:
    """One output of a prompt, as generated so far."""

    def __init__(
        self,
        request_id: str,
        index: int,
        params: SamplingParams,
        codec: TextCodec | None,
        routes: OutputRoutes | None,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.last_token_s = time.monotonic()  # time of the last token, or of the request's arrival
        self.replica = 0  # the replica that sent the last token
        self._stop_reason: int | str | None = None
        self._token_ids: list[int] = []
        self._weight_versions: list[WeightSpan] = []
        self._keeps_stop = params.include_stop_str_in_output
        self._codec = codec
        self._text = None if codec is None else OutputText(codec, params)
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._routes = routes

    def update(self, update: RequestUpdate) -> None:
        if self._routes is not None:
            self._routes.add(update.routes)
        for place, token_id in enumerate(update.token_ids):
            self._token_ids.append(token_id)
            self._note_version(update.weight_version)
            if self._logprobs is not None:
                self._logprobs.append(logprob_of_token(update.logprobs[place], self._codec))
                self._cumulative_logprob += update.logprobs[place].logprobs[0]
            # As in vLLM, the ids include the token that ends the output, but the text does not.
            is_stop_token = update.finish_reason == "stop" and place == len(update.token_ids) - 1
            if self._text is not None and (self._keeps_stop or not is_stop_token):
                stop = self._text.add(token_id)
                if stop is not None:  # drop later tokens of the update
                    self.finish_reason, self._stop_reason = "stop", stop
                    return
        if update.finish_reason is not None:
            self.finish_reason, self._stop_reason = update.finish_reason, update.stop_reason
            if self._text is not None:
                self._text.finish()

    def _routed_experts(self) -> Routes | None:
        """Return the experts of an output that has ended."""
        if self._routes is None or self.finish_reason is None:
            return None
        return self._routes.array(len(self._token_ids))

    def _note_version(self, version: str) -> None:
        """Note the version of the weights that have computed the last token."""
        stop = len(self._token_ids)
        start = stop - 1
        if self._weight_versions and self._weight_versions[-1].version == version:
            start = self._weight_versions.pop().start
        self._weight_versions.append(WeightSpan(version, start, stop))

    @property
    def size(self) -> tuple[int, int, bool]:
        """The number of tokens and of characters, and True if the output has ended."""
        return len(self._token_ids), 0 if self._text is None else len(self._text.text), self.finish_reason is not None

    def snapshot(self, first_token: int = 0, first_character: int = 0) -> CompletionOutput:
        """Return the part of the output that begins at a token and at a character."""
        return CompletionOutput(
            index=self.index,
            text="" if self._text is None else self._text.text[first_character:],
            token_ids=self._token_ids[first_token:],
            logprobs=None if self._logprobs is None else self._logprobs[first_token:],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            weight_versions=tuple(self._weight_versions),
            routed_experts=self._routed_experts(),
        )


class _PromptInFlight:
    """One prompt and its outputs."""

    def __init__(
        self,
        prompt_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        outputs: list[_OutputInFlight],
        codec: TextCodec | None,
    ) -> None:
        self.prompt_id = prompt_id
        self.outputs = outputs
        self._codec = codec
        self.arrival_s = time.monotonic()
        self._prompt = prompt
        self._output_kind = params.output_kind
        self._sizes_taken = [(0, 0, False)] * len(outputs)  # sizes at the last call of `new_output`
        self._needs_logprobs = params.prompt_logprobs is not None
        self._logprobs: PromptLogprobs | None = None
        self._num_cached_tokens = 0
        self._kv_transfer_params: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._prompt.token_ids)

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    def update(self, update: RequestUpdate) -> None:
        """Apply the fields of the first output's update that describe the prompt."""
        self._num_cached_tokens = max(self._num_cached_tokens, update.num_cached_tokens)
        if update.kv_blocks is not None:
            self._kv_transfer_params = _kv_transfer_params(update.kv_blocks)
        if self._needs_logprobs and self._logprobs is None and update.token_ids:
            self._logprobs = PromptLogprobs(update.prompt_logprobs, self._codec)

    def new_output(self) -> RequestOutput | None:
        """Return new output since the last call; None if there is none. See `Frontend.new_output`."""
        sizes = [output.size for output in self.outputs]
        changed = [index for index, size in enumerate(sizes) if size != self._sizes_taken[index]]
        if not changed or (self._output_kind is RequestOutputKind.FINAL_ONLY and not self.finished):
            return None
        taken, self._sizes_taken = self._sizes_taken, sizes
        if self._output_kind is not RequestOutputKind.DELTA:
            return self.snapshot()
        return self._request_output([self.outputs[index].snapshot(*taken[index][:2]) for index in changed])

    def snapshot(self) -> RequestOutput:
        return self._request_output([output.snapshot() for output in self.outputs])

    def _request_output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self.prompt_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=self._logprobs,
            num_cached_tokens=self._num_cached_tokens,
            kv_transfer_params=self._kv_transfer_params,
        )


def _salt_of_routes(forced_routes: bytes) -> str:
    """Return a part of the cache salt, so that only requests with the same forced experts share keys and values."""
    return f":routes {hashlib.sha256(forced_routes).hexdigest()}" if forced_routes else ""


def _is_for_other_engine(params: SamplingParams) -> bool:
    return params.kv_transfer is not None and params.kv_transfer.do_remote_decode


def _source(params: SamplingParams) -> PeerBlocks | None:
    """Return the blocks that another engine keeps for this request."""
    transfer = params.kv_transfer
    if transfer is None or not transfer.do_remote_prefill:
        return None
    return PeerBlocks(
        handle=transfer.remote_handle, addresses=transfer.remote_addresses, num_blocks=transfer.remote_num_blocks
    )


def _kv_transfer_params(blocks: PeerBlocks) -> dict[str, Any]:
    """Return the parameters with which another engine can load these blocks."""
    return {
        "do_remote_prefill": True,
        "remote_handle": blocks.handle,
        "remote_addresses": blocks.addresses,
        "remote_num_blocks": blocks.num_blocks,
    }


def _request_seed(seed: int | None, engine_seed: int, prompt_number: int, index: int) -> int:
    """Return the seed of one output, from 0 to 2**64 - 1, different for each output of a prompt."""
    if seed == RANDOM_SEED:
        return secrets.randbits(64)
    if seed is not None and index == 0:
        return seed % 2**64
    source = f"seed {seed}, output {index}"
    if seed is None:
        source = f"engine seed {engine_seed}, prompt {prompt_number}, output {index}"
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "little")
