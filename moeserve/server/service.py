"""`Service`: the interface through which endpoints generate. It queues requests, runs them, and counts them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

import numpy as np

from moeserve.api.answers import find_family, readable_params
from moeserve.api.async_llm import AsyncLLM
from moeserve.errors import MoeserveError
from moeserve.outputs import CompletionOutput, RequestOutput
from moeserve.sampling_params import RequestOutputKind, SamplingParams
from moeserve.server.admission import Admission
from moeserve.server.client import Client
from moeserve.server.errors import ApiError, PromptKept, api_error, shutting_down
from moeserve.server.schema import RequestBody, version_triples
from moeserve.server.totals import Totals
from moeserve.server.tracing import Tracing

logger = logging.getLogger(__name__)

# Fraction by which more requests are admitted than can run, so that the engine always has a next request.
AHEAD = 0.25
SECONDS_BETWEEN_LOOKS = 0.25  # interval between checks of the number of replicas
MAX_LOGGED_FIELDS = 256  # number of unknown fields that are logged
END_FIELDS = ("weight_versions", "routed_experts")  # fields of a choice at its end; see `Service.end_fields`
MAX_PREPARED = 2  # maximum number of prompts that are rendered and tokenized at the same time
# Seconds for ended requests to send their errors. The second value applies after a second signal.
SECONDS_TO_END, SECONDS_TO_END_AT_ONCE = 5.0, 1.0


class Service:
    """One served model. Endpoints validate requests, call `generate`, and convert outputs to responses."""

    def __init__(
        self,
        llm: AsyncLLM,
        model_names: list[str],
        *,
        max_waiting: int,
        num_processes: int = 1,
        parser: str | None = None,
        chat_template: str | None = None,
        trusts_templates: bool = False,
        is_strict: bool = False,
        others: Callable[[], Iterable[Totals]] = tuple,
        tracing: Tracing | None = None,
    ) -> None:
        """
        Args:
            model_names: names of the model that requests may use; responses use the first.
            max_waiting: maximum number of waiting outputs, over all processes together; see `Admission`.
            num_processes: number of processes that serve the engine. They share its capacity and the queue equally.
            parser: name of the parser of tool calls and reasoning; None: the parser of the checkpoint's family.
            chat_template: a template that replaces the checkpoint's.
            trusts_templates: requests may have a chat template of their own.
            is_strict: refuse requests with unknown fields.
            others: returns the totals of the server's other processes.
            tracing: sends a span for each prompt; None: no spans. `drain` closes it.

        Raises:
            SettingsError: no parser has this name.
        """
        self.llm = llm
        self.model_names = model_names
        self._tracing = tracing
        self.created = int(time.time())
        self.default_params = llm.get_default_sampling_params()
        self.chat_template = chat_template
        template = chat_template or (None if llm.codec is None else llm.codec.chat_template)
        self.parser = find_family(parser, llm.config.weights.model_path, template)

        def num_admitted() -> int:
            config = llm.config  # the number of replicas may change
            max_running = config.schedule.max_num_seqs * config.parallel.data_parallel_size
            return math.ceil((max_running + int(AHEAD * max_running)) / num_processes)

        self.admission = Admission(num_admitted, math.ceil(max_waiting / num_processes))
        # Renders conversations before they are sent to the engine. Long ones take a while, so clients take turns.
        self.preparation = Admission(lambda: MAX_PREPARED, self.admission.max_outputs)
        self._others = others
        self._cache_epoch = 0  # see `Totals`
        self._is_strict, self._trusts_templates = is_strict, trusts_templates
        self._logged_fields: set[str] = set()

    @property
    def max_model_len(self) -> int:
        return self.llm.config.schedule.max_model_len

    @property
    def own_totals(self) -> Totals:
        """Totals of the requests to this process."""
        admission = self.admission
        return Totals(
            self.llm.session.frontend.stats,
            admission.waits,
            admission.num_waiting,
            admission.num_running,
            self._cache_epoch,
        )

    @property
    def totals(self) -> Totals:
        """Totals of the requests to all processes. The totals of other processes are up to a second old."""
        return sum(self._others(), self.own_totals)

    @property
    def is_ready(self) -> bool:
        """True if requests are served."""
        has_failed = self.llm.errored or self.llm.session.engine.has_failed
        return self.llm.is_running and not has_failed and not self.admission.is_closed

    @property
    def _may_abort(self) -> bool:
        """True if an output may be aborted by a pause, rather than by a shutdown."""
        return self.llm.config.weights.rl and not self.admission.is_closed

    def end_fields(self, output: CompletionOutput) -> dict[str, Any]:
        """Return fields for trainers, which a choice has at the end of its output.

        With the setting `rl`, "weight_versions" is included. If routes are returned, "routed_experts" is included, as a
        .npy file in base64.
        """
        fields: dict[str, Any] = {}
        if output.finish_reason is not None and self.llm.config.weights.rl:
            fields["weight_versions"] = version_triples(output)
        if output.routed_experts is not None:
            file = io.BytesIO()
            np.save(file, output.routed_experts, allow_pickle=False)
            fields["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return fields

    def require_model(self, name: str | None) -> str:
        """Return the model's name for the response.

        Raises:
            ApiError: the request names another model.
        """
        if name is not None and name not in self.model_names:
            known = ", ".join(map(repr, self.model_names))
            raise ApiError(
                404, f"the model {name[:100]!r} is not served here, but {known}", param="model", code="model_not_found"
            )
        return self.model_names[0] if name is None else name

    def begin(self, body: RequestBody) -> str:
        """Return the model's name for the response. Log unknown fields of the request, each name once.

        Raises:
            ApiError: the request names another model, or has an unknown field and the server is strict.
        """
        for name in body.unknown_fields:
            if self._is_strict:
                raise ApiError(
                    400,
                    f"{name[:100]} is not known here; leave it out, or serve without --strict-requests",
                    param=name[:100],
                    code="unsupported_parameter",
                )
            if name not in self._logged_fields and len(self._logged_fields) < MAX_LOGGED_FIELDS:
                self._logged_fields.add(name)
                logger.warning("requests have the unknown field %.100r, which is ignored", name)
        return self.require_model(body.model)

    def num_written(self, num_prompt: int, num_cached: int) -> int:
        """Return the number of prompt tokens that a request adds to the prefix cache: full blocks not found there."""
        config = self.llm.config
        return (
            max(0, num_prompt - num_cached - num_prompt % config.cache.block_size)
            if config.cache.enable_prefix_caching
            else 0
        )

    def allowed_template(self, template: str | None) -> str | None:
        """Return the request's chat template; None if it has none.

        Raises:
            ApiError: the server does not allow templates in requests.
        """
        if template and not self._trusts_templates:
            raise ApiError(
                400,
                "chat_template is not supported here: serve with --trust-request-chat-template to allow it",
                param="chat_template",
                code="unsupported_parameter",
            )
        return template or None

    async def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        arguments: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation. Rendering runs in a thread, so that it does not block other requests.

        Args:
            continue_final_message: as for `LLM.chat_prompt`.
            chat_template: the request's template; None: the server's template.

        Raises:
            ApiError: there is no chat template, or it refuses the conversation.
        """
        try:
            prompt = await asyncio.to_thread(
                self.llm.chat_prompt,
                messages,
                tools=tools,
                chat_template=chat_template or self.chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=arguments,
            )
        except MoeserveError as error:
            raise api_error(error) from error
        return prompt["prompt_token_ids"]

    def parsed_params(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling parameters, changed so that the parser can read the outputs."""
        if self.llm.codec is None:
            return params
        return readable_params(params, self.parser, self.llm.codec)

    def generate(
        self, client: Client, prompt: str | list[int], params: SamplingParams, cache_salt: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield new output of a prompt.

        Args:
            cache_salt: a salt that the client chose. Requests share prefixes only if both API key and salt are equal.

        Raises:
            ApiError: the request cannot be served, or has failed.
            PromptKept: raised instead of any output if the request ends after its prompt.
        """
        if params.kv_transfer is not None and params.kv_transfer.do_remote_decode:
            return _kept(self._traced(client, prompt, params.for_prompt(), cache_salt))
        return self._traced(client, prompt, params, cache_salt)

    def _traced(
        self, client: Client, prompt: str | list[int], params: SamplingParams, cache_salt: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        if self._tracing is None:
            return self._generate(client, prompt, params, cache_salt)

        def generate(note_admitted: Callable[[], None]) -> AsyncGenerator[RequestOutput, None]:
            return self._generate(client, prompt, params, cache_salt, note_admitted)

        return self._tracing.traced(client, self.model_names[0], params, generate)

    async def _generate(
        self,
        client: Client,
        prompt: str | list[int],
        params: SamplingParams,
        cache_salt: str | None,
        note_admitted: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Implement `generate` without tracing. `note_admitted` is called when the prompt leaves the queue."""
        params.output_kind = RequestOutputKind.DELTA
        field = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        epoch = f"{self._cache_epoch}:" if self._cache_epoch else ""
        salt = hashlib.sha256(f"{epoch}{client.name}/{cache_salt or ''}".encode()).hexdigest()
        async with self.admission.admitted(client.name, params.n):
            note_admitted()
            outputs = self.llm.generate({field: prompt, "cache_salt": salt}, params)
            try:
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        for each in output.outputs:
                            if each.finish_reason == "abort" and not self._may_abort:  # the engine is shutting down
                                raise shutting_down()
                        yield output
            except MoeserveError as error:
                raise api_error(error) from error

    async def follow_other_processes(self) -> None:
        """Admit waiting requests if replicas were added, and apply resets of the prefix cache.

        Any process of the server may have added the replicas or reset the cache.
        """
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            self.admission.admit_waiting()
            self._cache_epoch = max([self._cache_epoch, *(each.cache_epoch for each in self._others())])

    def reset_prefix_cache(self) -> None:
        """Make prefixes of earlier requests unfindable, by a new salt in the digests of later requests' blocks."""
        self._cache_epoch = max(self._cache_epoch + 1, time.time_ns())  # the clock may have been set back

    async def drain(self, timeout_s: float, is_forced: Callable[[], bool]) -> None:
        """Refuse new requests, and wait until running requests have ended. After a timeout, end them with an error.

        Args:
            is_forced: returns True once running requests must end at once.
        """
        self.admission.close()
        self.preparation.close()
        ends_at = time.monotonic() + timeout_s
        while self.admission.num_running and time.monotonic() < ends_at and not is_forced():
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self.llm.shutdown)
        # Wait until ended requests have sent their errors, but not for long, because some clients do not read.
        ends_at = time.monotonic() + (SECONDS_TO_END_AT_ONCE if is_forced() else SECONDS_TO_END)
        while self.admission.num_running and time.monotonic() < ends_at:
            await asyncio.sleep(0.02)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


async def _kept(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    """Yield outputs that are not finished. At the end, raise PromptKept with the parameters of the KV transfer."""
    params = None
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            params = output.kv_transfer_params
            if not output.finished:
                yield output
    raise PromptKept(params)
