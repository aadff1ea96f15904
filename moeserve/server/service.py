"""`Service`: the engine as the endpoints see it. Each request passes the queue, the engine, and the statistics."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from moeserve.api.async_llm import AsyncLLM
from moeserve.errors import MoeserveError
from moeserve.models.config_values import read_json
from moeserve.outputs import RequestOutput
from moeserve.parsers.families import find_parser
from moeserve.sampling_params import RequestOutputKind, SamplingParams
from moeserve.server.admission import Admission
from moeserve.server.client import Client
from moeserve.server.errors import ApiError, PromptKept, api_error, shutting_down
from moeserve.server.totals import Totals
from moeserve.server.tracing import Tracing

# Share of requests beyond those that run, which wait inside the engine so that it always has a next one.
AHEAD = 0.25
SECONDS_BETWEEN_LOOKS = 0.25  # at the number of replicas
MAX_PREPARED = 2  # prompts that are rendered and tokenized at a time
# For requests that are ended to send their errors; after the second signal.
SECONDS_TO_END, SECONDS_TO_END_AT_ONCE = 5.0, 1.0


class Service:
    """One model that is served. Endpoints check requests, call `generate`, and write what comes."""

    def __init__(
        self,
        llm: AsyncLLM,
        model_names: list[str],
        *,
        max_waiting: int,
        num_processes: int = 1,
        parser: str | None = None,
        others: Callable[[], Iterable[Totals]] = tuple,
        tracing: Tracing | None = None,
    ) -> None:
        """
        Args:
            model_names: names that requests may give; answers give the first.
            max_waiting: as for `Admission`, of all processes together.
            num_processes: that serve the engine. Each has an equal share of its places and of the queue.
            parser: of tool calls and reasoning; None: that of the checkpoint's family.
            others: returns the totals of each other process of the server.
            tracing: sends a span for each prompt; None: no spans are made. It is closed by `drain`.

        Raises:
            SettingsError: there is no parser of this name.
        """
        self.llm = llm
        self.model_names = model_names
        self._tracing = tracing
        self.created = int(time.time())
        template = None if llm.codec is None else llm.codec.chat_template
        self.parser = find_parser(parser, model_type=_model_type(llm.config.model_path), chat_template=template)

        def num_admitted() -> int:
            config = llm.config  # the number of replicas may change
            max_running = config.max_num_seqs * config.data_parallel_size
            return math.ceil((max_running + int(AHEAD * max_running)) / num_processes)

        self.admission = Admission(num_admitted, math.ceil(max_waiting / num_processes))
        # Prompts of conversations before they are sent to the engine. Long ones take a while, so keys take turns.
        self.preparation = Admission(lambda: MAX_PREPARED, self.admission.max_outputs)
        self._others = others

    @property
    def max_model_len(self) -> int:
        return self.llm.config.max_model_len

    @property
    def own_totals(self) -> Totals:
        """Totals of the requests to this process."""
        admission = self.admission
        return Totals(self.llm.session.frontend.stats, admission.waits, admission.num_waiting, admission.num_running)

    @property
    def totals(self) -> Totals:
        """Totals of the requests to all processes. Those of others are up to a second old."""
        return sum(self._others(), self.own_totals)

    @property
    def is_ready(self) -> bool:
        """True if requests are served."""
        has_failed = self.llm.errored or self.llm.session.engine.has_failed
        return self.llm.is_running and not has_failed and not self.admission.is_closed

    def require_model(self, name: str | None) -> str:
        """Return the model's name for the answer.

        Raises:
            ApiError: another model is requested.
        """
        if name is not None and name not in self.model_names:
            known = ", ".join(map(repr, self.model_names))
            raise ApiError(
                404, f"the model {name[:100]!r} is not served here, but {known}", param="model", code="model_not_found"
            )
        return self.model_names[0] if name is None else name

    async def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        arguments: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> list[int]:
        """Render a conversation. Long ones take a while, and must not hold up other requests.

        Raises:
            ApiError: the chat template refuses the conversation, or there is none.
        """
        try:
            prompt = await asyncio.to_thread(
                self.llm.chat_prompt,
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=arguments,
            )
        except MoeserveError as error:
            raise api_error(error) from error
        return prompt["prompt_token_ids"]

    def parsed_params(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters with which the parser can read the outputs."""
        if self.parser is None or self.llm.codec is None:
            return params
        params = params.copy()
        params.skip_special_tokens = params.skip_special_tokens and not self.parser.keeps_special_tokens
        known = [self.llm.codec.id_of_token(token) for token in self.parser.stop_tokens]
        params.stop_token_ids = [*params.stop_token_ids, *(token_id for token_id in known if token_id is not None)]
        return params

    def generate(
        self, client: Client, prompt: str | list[int], params: SamplingParams, cache_salt: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what the outputs of a prompt gain.

        Args:
            cache_salt: chosen by the client: prefixes are shared between requests of a key with equal salts.

        Raises:
            ApiError: the request cannot be served, or failed.
            PromptKept: instead of any output, if the request ends with its prompt.
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
        """See `generate`."""
        params.output_kind = RequestOutputKind.DELTA
        field = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        salt = hashlib.sha256(f"{client.name}/{cache_salt or ''}".encode()).hexdigest()
        async with self.admission.admitted(client.name, params.n):
            note_admitted()
            outputs = self.llm.generate({field: prompt, "cache_salt": salt}, params)
            try:
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        for each in output.outputs:
                            if each.finish_reason == "abort":  # the engine ends
                                raise shutting_down()
                        yield output
            except MoeserveError as error:
                raise api_error(error) from error

    async def admit_after_scaling(self) -> None:
        """Admit requests that wait when there are more replicas; this or another process may have added them."""
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            self.admission.admit_waiting()

    async def drain(self, timeout_s: float, is_forced: Callable[[], bool]) -> None:
        """Refuse new requests, and wait until those that run have ended; after a time, end them with an error.

        Args:
            is_forced: true once those that run are to end at once.
        """
        self.admission.close()
        self.preparation.close()
        ends_at = time.monotonic() + timeout_s
        while self.admission.num_running and time.monotonic() < ends_at and not is_forced():
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self.llm.shutdown)
        # Until they have sent their errors. Some clients do not read.
        ends_at = time.monotonic() + (SECONDS_TO_END_AT_ONCE if is_forced() else SECONDS_TO_END)
        while self.admission.num_running and time.monotonic() < ends_at:
            await asyncio.sleep(0.02)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


async def _kept(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    """Raise PromptKept at the end of the only output, which is one token."""
    params = None
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            params = output.kv_transfer_params
            if not output.finished:
                yield output
    raise PromptKept(params)


def _model_type(folder: str) -> str:
    return str(read_json(Path(folder) / "config.json").get("model_type", ""))
