"""`AsyncLLM`: the engine for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

from moeserve.api import vllm_calls
from moeserve.api.engine_thread import EngineThread
from moeserve.api.prompts import Params, Prompt, chat_prompt
from moeserve.api.rollouts import AsyncRollouts
from moeserve.api.scoring import requests_of, score_of
from moeserve.api.session import Session
from moeserve.api.signatures import lists_settings
from moeserve.api.startup import TextParts, start_engine, tokenizer_of
from moeserve.config.engine_config import EngineConfig
from moeserve.config.resolve_parallel import shown_layout
from moeserve.config.validation import parse_settings
from moeserve.config.vllm_options import ARGUMENTS, require_harmless
from moeserve.errors import EngineError
from moeserve.outputs import RequestOutput, SequenceScore
from moeserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moeserve.api.setting_arguments import SettingArguments

NUM_GRAMMAR_THREADS = 4  # requests whose grammars are compiled at the same time
# Maximum seconds that a thread which computes in Python keeps the interpreter lock while another thread waits for the
# lock. A GPU finishes a decode step in about the default of 5 ms, so that the next plan would come a whole step late.
SWITCH_SECONDS = 5e-4


class AsyncLLM(AsyncRollouts):
    """A model that many asyncio tasks use at once. Their requests share every engine step.

        llm = AsyncLLM("path/to/Mixtral")
        async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)
        llm.shutdown()

    The constructor blocks until the model is loaded, so it should not be called in an event loop. Tasks of several
    event loops, in several threads, may use one object. The settings are those of `LLM`; methods are named as in vLLM's
    AsyncLLM.

    The engine's plans are made in a thread of this process. With a GPU, the process's switch interval
    (`sys.setswitchinterval`) is lowered to half a millisecond for this thread. A single rank also runs in this process,
    unless executor="mp".

    Raises:
        SettingsError, CheckpointError, EngineError: as for `LLM`.
    """

    @lists_settings
    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        show_progress: bool = True,
        **settings: Unpack[SettingArguments],
    ) -> None:
        """Load a model.

        Args:
            model, show_progress, settings: as for `LLM`.
        """
        started = start_engine(parse_settings({"model": model, **settings}), show_progress=show_progress)
        self._use(started.open_session(), started.texts)

    @classmethod
    def of_session(cls, session: Session, texts: TextParts) -> AsyncLLM:
        """Return an `AsyncLLM` that owns a session and shuts it down."""
        llm = cls.__new__(cls)
        llm._use(session, texts)
        return llm

    def _use(self, session: Session, texts: TextParts) -> None:
        self.session, self.codec, self._default_params = session, texts.codec, texts.default_params
        # Apart from the event loop's threads, because a check of a grammar may take seconds.
        self._grammar_threads = ThreadPoolExecutor(NUM_GRAMMAR_THREADS, "grammars")
        if self.config.compute.device == "cuda":
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._engine_thread = EngineThread(session)
        # Also called when the object is deleted and when Python exits, because the engine must end before Python does.
        self._stop = weakref.finalize(self, self._engine_thread.stop)

    @property
    def config(self) -> EngineConfig:
        """The resolved settings. `scale` changes `data_parallel_size`."""
        return self.session.engine.config

    @property
    def is_running(self) -> bool:
        return self._engine_thread.is_running

    @property
    def errored(self) -> bool:
        """True if the engine has failed for good. With on_failure="restart", a failure is not final."""
        return self._engine_thread.errored

    @property
    def dead_error(self) -> BaseException:
        """The error that requests get after the engine has failed or was shut down."""
        return self._engine_thread.dead_error

    @classmethod
    def from_engine_args(cls, engine_args: Any, **others: Any) -> AsyncLLM:
        """Return an `AsyncLLM` with the settings of an `AsyncEngineArgs`.

        Args:
            others: further arguments of vLLM, which have no effect.
        """
        return cls(**engine_args.settings)

    def __repr__(self) -> str:
        state = "failed" if self.errored else "running" if self.is_running else "shut down"
        return f"AsyncLLM(model={self.config.weights.model_path!r}, {shown_layout(self.config.parallel)}, {state})"

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        lora_request: Any = None,
        tokenization_kwargs: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt. Yield the output so far whenever the output grows, or the part that `output_kind`
        selects.

        A consumer that is slower than the engine receives several tokens at once. Cancelling the task or closing the
        iterator aborts the request.

        Args:
            prompt: a text, a list of token ids, or a dict; see `LLM.generate`.
            sampling_params: None: the parameters of generation_config.json.
            request_id: id of the outputs, which no other request in flight may have; None: a new id.
            lora_request, tokenization_kwargs, trace_headers, priority, data_parallel_rank: not supported; must be left
                out, None or 0.

        Raises:
            RequestError: the prompt, a parameter or the id cannot be served.
            QueueFullError: too many requests are in flight; see `max_queued_requests`.
            EngineError: a step failed and ended the request, or the engine has failed or was shut down.
        """
        require_harmless(
            ARGUMENTS,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
        )
        if not self.is_running or self.errored:
            raise EngineError(str(self.dead_error))
        params = self._default_params if sampling_params is None else sampling_params
        prompt_id = await self._submit(prompt, params, request_id)
        try:
            mailbox = self._engine_thread.open_mailbox(prompt_id)
            is_finished = False
            while not is_finished:
                await mailbox.changed.wait()
                mailbox.changed.clear()
                output = self.session.new_output(prompt_id)
                if output is None:
                    self.session.raise_error([prompt_id])
                    if self._engine_thread.has_ended:
                        raise EngineError(str(self.dead_error))
                else:
                    is_finished = output.finished
                    if is_finished:
                        self.session.raise_error([prompt_id])
                    yield output
        finally:
            self._engine_thread.discard(prompt_id)

    async def chat(
        self,
        messages: Any,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation. Yield the output as `generate` does.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            sampling_params, request_id: as for `generate`.
            chat_template, tools, add_generation_prompt, continue_final_message, chat_template_kwargs: as for
                `LLM.chat_prompt`.

        Raises:
            RequestError, QueueFullError, EngineError: as for `generate`. Also RequestError without a chat template.
        """
        prompt = await asyncio.to_thread(
            self.chat_prompt,
            messages,
            chat_template=chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        async with contextlib.aclosing(self.generate(prompt, sampling_params, request_id)) as outputs:
            async for output in outputs:
                yield output

    async def score(
        self,
        sequence: Sequence[int],
        prompt_length: int,
        *,
        temperature: float = 1.0,
        top_logprobs: int = 0,
        routed_experts: Any = None,
    ) -> SequenceScore:
        """Return the log-probabilities of the tokens of one sequence after its prompt; see `LLM.score`.

        Raises:
            RequestError, QueueFullError, EngineError: as for `generate`.
        """
        mode = self.config.texts.logprobs_mode
        (prompt,), (params,), _ = requests_of(
            [sequence], [prompt_length], temperature, top_logprobs, mode, [routed_experts]
        )
        async with contextlib.aclosing(self.generate(prompt, params)) as outputs:
            async for output in outputs:
                last = output
        return score_of(last, prompt_length)

    def chat_prompt(
        self,
        messages: Any,
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, list[int]]:
        """Render a conversation as a prompt for `generate`; see `LLM.chat_prompt`.

        A long conversation takes milliseconds.
        """
        return chat_prompt(
            self.codec,
            messages,
            chat_template=chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            check_length=self.session.frontend.check_conversation,
        )

    async def check_params(self, sampling_params: SamplingParams) -> None:
        """Raise RequestError for sampling parameters that cannot be served, such as a schema without a grammar."""
        check = self.session.frontend.check_params
        await asyncio.get_running_loop().run_in_executor(self._grammar_threads, check, sampling_params)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See `LLM.reset_prefix_cache`."""
        self.session.reset_prefix_cache()
        return True

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request in flight, or several. The iterators of these requests yield the output so far and stop."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            self.session.abort(each)
        self._engine_thread.run()

    async def check_health(self) -> None:
        """Raise EngineError if the engine cannot serve requests. A dead process is detected within about a second.

        With on_failure="restart", a failed engine counts as healthy, because the next request restarts it.
        """
        if self.errored or not self.is_running:
            raise EngineError(str(self.dead_error))

    async def get_tokenizer(self) -> Any:
        """Return the tokenizer as a transformers object.

        Raises:
            SettingsError: there is no tokenizer.
        """
        return tokenizer_of(self.codec)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the sampling parameters of generation_config.json, the defaults of `generate`."""
        return self._default_params.copy()

    async def scale(self, data_parallel_size: int) -> None:
        """Change the number of replicas while other tasks generate; see `LLM.scale`.

        If the calling task is cancelled, it stops waiting, but the change continues.
        """
        if not self.is_running or self.errored:
            raise EngineError(str(self.dead_error))
        changed = await asyncio.to_thread(self.session.scale, data_parallel_size)
        self._engine_thread.run()
        await asyncio.shield(asyncio.wrap_future(changed))

    def shutdown(self) -> None:
        """End all requests and free the model. May be called twice."""
        self._stop.detach()
        self._engine_thread.stop()
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise vllm_calls.missing_attribute("AsyncLLM", name)

    async def _submit(self, prompt: Prompt, params: Params, request_id: str | None) -> str:
        """Start a prompt, and return its id. Runs in a thread, because tokenizing would block the event loop."""
        submitted: Future[list[str]] = Future()

        def submit() -> None:
            try:
                submitted.set_result(self.session.submit([prompt], params, request_id))
            except Exception as error:
                submitted.set_exception(error)

        try:
            grammar = params.structured_outputs if isinstance(params, SamplingParams) else params
            pool = self._grammar_threads if grammar is not None else None
            await asyncio.get_running_loop().run_in_executor(pool, submit)
        except asyncio.CancelledError:  # a started thread goes on, even after the event loop has ended
            submitted.add_done_callback(self._discard_submitted)
            raise
        (prompt_id,) = submitted.result()
        return prompt_id

    def _discard_submitted(self, submitted: Future[list[str]]) -> None:
        if submitted.exception() is None:
            (prompt_id,) = submitted.result()
            self._engine_thread.discard(prompt_id)


AsyncLLMEngine = AsyncLLM  # vLLM's former name
