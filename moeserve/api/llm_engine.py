"""`LLMEngine`: an engine that a program steps itself."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from moeserve.api import vllm_calls
from moeserve.api.metrics import Metric, metrics_of
from moeserve.api.prompts import Params, Prompt
from moeserve.api.session import Session
from moeserve.api.signatures import lists_settings
from moeserve.api.startup import TextParts, start_engine, tokenizer_of
from moeserve.config.engine_config import EngineConfig
from moeserve.config.validation import parse_settings
from moeserve.config.vllm_options import ARGUMENTS, require_harmless
from moeserve.errors import RequestError, shown
from moeserve.outputs import RequestOutput

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moeserve.api.setting_arguments import SettingArguments


class LLMEngine:
    """A loaded model whose steps the caller runs, with vLLM's names.

        engine = LLMEngine("path/to/Mixtral")
        engine.add_request("first", "The capital of France is", SamplingParams(max_tokens=8))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.outputs[0].text)

    Most programs are simpler with `LLM` or `AsyncLLM`. One thread at a time may use an object.

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
    def from_engine_args(cls, engine_args: Any, **others: Any) -> LLMEngine:
        """Return an engine with the settings of an `EngineArgs`.

        Args:
            others: further arguments of vLLM, which have no effect.
        """
        return cls(**engine_args.settings)

    @classmethod
    def of_session(cls, session: Session, texts: TextParts) -> LLMEngine:
        """Return an `LLMEngine` of a session that other objects use as well."""
        engine = cls.__new__(cls)
        engine._use(session, texts)
        return engine

    def _use(self, session: Session, texts: TextParts) -> None:
        self._session, self._texts = session, texts
        self._request_ids: set[str] = set()  # unfinished requests
        self._outputs: deque[RequestOutput] = deque()  # not yet returned by `step`

    @property
    def config(self) -> EngineConfig:
        """The resolved settings."""
        return self._session.engine.config

    def __repr__(self) -> str:
        num_unfinished = self.get_num_unfinished_requests()
        return f"LLMEngine(model={self.config.weights.model_path!r}, {num_unfinished} unfinished requests)"

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None = None,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        prompt_text: str | None = None,
    ) -> str:
        """Start one prompt. The next steps compute it.

        Args:
            request_id: id of the prompt's outputs, which no other unfinished request may have.
            prompt: a text, a list of token ids, or a dict; see `LLM.generate`.
            params: sampling parameters; None: the parameters of generation_config.json.
            arrival_time, prompt_text: no effect.
            lora_request, tokenization_kwargs, trace_headers, priority: not supported; must be left out, None or 0.

        Returns:
            The id.

        Raises:
            RequestError: the prompt, a parameter or the id cannot be served.
            QueueFullError: too many requests are in flight; see `max_queued_requests`.
        """
        require_harmless(
            ARGUMENTS,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        )
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={shown(request_id)} must be a text", parameter="request_id")
        self._session.submit([prompt], self._texts.default_params if params is None else params, request_id)
        self._request_ids.add(request_id)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step of the model, and return the outputs that have grown or ended.

        Raises:
            EngineError: the engine failed, and with it a request. The next call returns the outputs of other requests.
        """
        if not self._outputs and self._request_ids:
            self._collect(self._session.poll())
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def _collect(self, changed: list[str]) -> None:
        """Take the new outputs of requests, and then raise the first error of the requests that have failed."""
        failed = []
        for request_id in changed:
            if request_id not in self._request_ids:  # aborted, or of another user of the session
                continue
            if self._session.has_failed(request_id):
                failed.append(request_id)
            elif (output := self._session.new_output(request_id)) is not None:
                self._outputs.append(output)
                if output.finished:
                    self._end([request_id])
        try:
            self._session.raise_error(failed)
        finally:
            self._end(failed)

    def _end(self, request_ids: list[str]) -> None:
        self._session.discard(request_ids)
        self._request_ids.difference_update(request_ids)

    def has_unfinished_requests(self) -> bool:
        """Return True if `step` has work to do."""
        return bool(self._request_ids or self._outputs)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that have not finished."""
        return len(self._request_ids)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without further outputs. Ids of requests that have finished are ignored."""
        named = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._end([request_id for request_id in named if request_id in self._request_ids])

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See `LLM.reset_prefix_cache`."""
        self._session.reset_prefix_cache()
        return True

    def get_metrics(self) -> list[Metric]:
        """See `LLM.get_metrics`."""
        return metrics_of(self._session)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer as a transformers object.

        Raises:
            SettingsError: there is no tokenizer.
        """
        return tokenizer_of(self._texts.codec)

    def shutdown(self) -> None:
        """End all requests and free the model. May be called twice."""
        self._session.shutdown()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise vllm_calls.missing_attribute("LLMEngine", name)
