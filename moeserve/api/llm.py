"""`LLM`: the engine as a Python object."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from moeserve.api import vllm_calls
from moeserve.api.beam_search import BeamSearchOutput, BeamSearchSequence, search
from moeserve.api.llm_engine import LLMEngine
from moeserve.api.metrics import Metric, metrics_of
from moeserve.api.profiler import Profiler
from moeserve.api.prompts import Params, Prompt, Prompts, chat_prompt
from moeserve.api.rollouts import Rollouts
from moeserve.api.scoring import requests_of, score_of
from moeserve.api.signatures import lists_settings
from moeserve.api.startup import start_engine, tokenizer_of
from moeserve.config.engine_config import EngineConfig
from moeserve.config.resolve_parallel import shown_layout
from moeserve.config.validation import parse_settings
from moeserve.config.vllm_options import ARGUMENTS, require_harmless
from moeserve.errors import RequestError, SettingsError, shown
from moeserve.interrupts import interrupts_deferred
from moeserve.layers.moe.placement.placement import Placement, write_placements
from moeserve.models.checkpoint.packed_cache_writer import wait_for_cache_writers
from moeserve.outputs import RequestOutput, SequenceScore
from moeserve.progress import ProgressBar
from moeserve.sampling_params import BeamSearchParams, SamplingParams
from moeserve.telemetry.expert_load import LoadWindow

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moeserve.api.setting_arguments import SettingArguments


class LLM(Rollouts):
    """A loaded model, ready to generate text.

        with LLM("path/to/Mixtral") as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    Keyword arguments are settings, most of which have vLLM's names. `help(moeserve.LLM.__init__)` describes each one,
    and so does `moeserve generate --help`.

    Several threads may call one LLM, and several streams may be open. Their requests share every engine step.

    Raises:
        SettingsError: a setting is unknown, out of range, or does not fit the checkpoint or the machine.
        CheckpointError: the checkpoint is missing, damaged, or not supported.
        EngineError: a process of the engine could not be started.
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
            model: checkpoint folder in Hugging Face layout; None: the default model.
            show_progress: on a terminal, draw progress bars while building the default model and loading weights.
            settings: as described below.
        """
        parsed = parse_settings({"model": model, **settings})
        started = start_engine(parsed, show_progress=show_progress)
        self._profiler = Profiler(parsed.telemetry.profiler_config)
        self.session, self.codec = started.open_session(), started.texts.codec
        self._texts, self._default_params = started.texts, started.texts.default_params
        self._has_experts = started.has_experts
        self.core = self.session.engine

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLM:
        """Return an LLM with the settings of an `EngineArgs`."""
        return cls(**engine_args.settings)

    @property
    def config(self) -> EngineConfig:
        """The resolved settings. `scale` changes `data_parallel_size`."""
        return self.core.config

    def __repr__(self) -> str:
        weights = self.config.weights
        quantization = "" if weights.quantization is None else f"quantization={weights.quantization!r}, "
        return (
            f"LLM(model={weights.model_path!r}, dtype={weights.dtype!r}, {quantization}"
            f"device={self.config.compute.device!r}, {shown_layout(self.config.parallel)})"
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the sampling parameters of generation_config.json, the defaults of all calls."""
        return self._default_params.copy()

    def get_tokenizer(self) -> Any:
        """Return the tokenizer as a transformers object.

        Raises:
            SettingsError: there is no tokenizer.
        """
        return tokenizer_of(self.codec)

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        prompt_token_ids: Any = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Any = None,
    ) -> list[RequestOutput]:
        """Complete prompts, as many at a time as fit. They are started in the given order.

        Args:
            prompts: a text, a list of token ids, or {"prompt_token_ids": [...]} or {"prompt": "..."}; or any iterable
                of these. Arrays and tensors stand for lists. The dicts may have a "cache_salt": only prompts with equal
                salts share cached prefixes.
            sampling_params: one `SamplingParams` or dict for all prompts, or one for each; None:
                `get_default_sampling_params()`.
            prompt_token_ids: prompts as token ids, instead of `prompts`.
            use_tqdm: draw a progress bar if on a terminal; or a function with tqdm's arguments, which makes the bar.
            lora_request, tokenization_kwargs: not supported; must be left out or None.
            priority: must be 0 for each prompt, or left out: requests are served in the order of their arrival.

        Returns:
            One output for each prompt, in the same order.

        Raises:
            RequestError: a prompt or a parameter cannot be served. No prompt was started.
            EngineError: a prompt failed, or the engine has failed or was shut down. Unless the engine has failed, the
                other prompts finish before the error is raised. The `outputs` of the error are the outputs of all
                prompts.
        """
        require_harmless(
            ARGUMENTS, lora_request=lora_request, priority=priority, tokenization_kwargs=tokenization_kwargs
        )
        if (prompts is None) == (prompt_token_ids is None):
            raise RequestError("give either prompts or prompt_token_ids", parameter="prompt")
        given = prompt_token_ids if prompts is None else prompts
        params = self._default_params if sampling_params is None else sampling_params
        waiting = deque(self.session.frontend.encode(given, params))  # prompts that wait for room in the queue
        prompt_ids: list[str] = []
        unfinished: list[str] = []
        try:
            new_bar = use_tqdm if callable(use_tqdm) else ProgressBar
            with new_bar(total=len(waiting), desc="prompts", disable=None if use_tqdm else True) as progress:
                while waiting or unfinished:
                    with interrupts_deferred():  # `finally` can then discard the new prompts
                        started = self.session.submit_first(waiting)
                        prompt_ids += started
                        unfinished += started
                    num_before = len(unfinished)
                    unfinished = self.session.advance(unfinished, waits_for_others=bool(waiting))
                    progress.update(num_before - len(unfinished))
            outputs = [self.session.output(prompt_id) for prompt_id in prompt_ids]
            self.session.raise_error(prompt_ids, outputs)
            return outputs
        finally:
            self.session.discard(prompt_ids)

    def stream(self, prompt: Prompt, sampling_params: Params | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt. Yield the output so far after new tokens, or the part that `output_kind` selects.

        Closing the iterator, or its collection by the garbage collector, aborts the request. Arguments and errors are
        those of `generate`; errors are raised with the first output.
        """
        params = self._default_params if sampling_params is None else sampling_params
        prompt_ids: list[str] = []
        try:
            with interrupts_deferred():  # `finally` can then discard the prompt
                prompt_ids = self.session.submit([prompt], params)
            unfinished = prompt_ids
            while unfinished:
                unfinished = self.session.advance(prompt_ids)
                if (output := self.session.new_output(prompt_ids[0])) is not None:
                    self.session.raise_error(prompt_ids)
                    yield output
            self.session.raise_error(prompt_ids)
        finally:
            self.session.discard(prompt_ids)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: Any = "auto",
        tokenization_kwargs: Any = None,
        mm_processor_kwargs: Any = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several.

        Args:
            messages: [{"role": "user", "content": "..."}, ...], or a list of such lists.
            sampling_params, use_tqdm, lora_request: as for `generate`.
            chat_template, tools, add_generation_prompt, continue_final_message, chat_template_kwargs: as for
                `chat_prompt`.
            chat_template_content_format, tokenization_kwargs, mm_processor_kwargs: not supported; must be left out,
                None or "auto".

        Raises:
            RequestError, EngineError: as for `generate`. Also RequestError if there is no chat template.
        """
        require_harmless(
            ARGUMENTS,
            lora_request=lora_request,
            chat_template_content_format=chat_template_content_format,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        given: object = messages
        if isinstance(given, str):
            raise RequestError(f"messages={shown(given)} must be a list of messages; pass a text to generate")
        is_one = isinstance(messages, Mapping) or not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else messages
        prompts = [
            self.chat_prompt(
                conversation,
                chat_template=chat_template,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: int | Sequence[int],
        *,
        temperature: float = 1.0,
        top_logprobs: int = 0,
        routed_experts: Sequence[Any] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[SequenceScore]:
        """Return the log-probabilities of the tokens of sequences after their prompts, without sampling.

        `generate` returns the same log-probabilities for the same tokens and temperature. They are equal to the last
        bit if results do not depend on the batch (see `batch_invariant`). With `logprobs_mode="processed_logprobs"`,
        requests must have no bias, penalties, grammar, `min_p`, `top_k` and `top_p` for this. No cached prefix is used.

        Args:
            sequences: token ids of each sequence, at least two, as lists, tensors or arrays.
            prompt_lengths: the number of tokens at the start of each sequence that are not scored, from 1; one number
                stands for all sequences.
            temperature: divides the logits; other numbers than 1 need `logprobs_mode="processed_logprobs"`.
            top_logprobs: also return the log-probabilities of this many most likely tokens.
            routed_experts: for each sequence the experts to use, integers [tokens - 1, layers, experts of a token] as
                in `CompletionOutput`, or None for the router's choice. The router gives the weights of experts in any
                case. Needs `enable_return_routed_experts`.
            use_tqdm: as for `generate`.

        Returns:
            One score for each sequence, in the same order.

        Raises:
            RequestError, EngineError: as for `generate`.
        """
        mode = self.config.texts.logprobs_mode
        prompts, params, lengths = requests_of(
            sequences, prompt_lengths, temperature, top_logprobs, mode, routed_experts
        )
        outputs = self.generate(prompts, params, use_tqdm=use_tqdm)
        return [score_of(*each) for each in zip(outputs, lengths, strict=True)]

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the most likely outputs of each prompt that beam search finds, the best one first.

        Each token is computed by calls of `generate`, whose prompts share cached prefixes.

        Args:
            prompts: as for `generate`.
            params: the numbers of candidates and of tokens.
            lora_request: not supported; must be None.
            use_tqdm: draw a progress bar of tokens if on a terminal.
            concurrency_limit: no effect: the queue has its own limit.

        Raises:
            RequestError, EngineError: as for `generate`.
        """
        require_harmless(ARGUMENTS, lora_request=lora_request)
        frontend = self.session.frontend
        encoded = [prompt.token_ids for prompt, _ in frontend.encode(prompts, SamplingParams())]
        with ProgressBar(total=params.max_tokens, desc="tokens", disable=None if use_tqdm else True) as progress:

            def generate(token_ids: list[list[int]], step: SamplingParams) -> list[RequestOutput]:
                progress.update()
                return self.generate([{"prompt_token_ids": each} for each in token_ids], step, use_tqdm=False)

            found = search(
                encoded,
                params,
                generate,
                end_token_ids=frontend.eos_token_ids,
                max_model_len=self.config.schedule.max_model_len,
            )
        return [BeamSearchOutput([self._with_text(each, params) for each in sequences]) for sequences in found]

    def _with_text(self, sequence: BeamSearchSequence, params: BeamSearchParams) -> BeamSearchSequence:
        if self.codec is None:
            return sequence
        leaves_end_out = sequence.finish_reason == "stop" and not params.include_stop_str_in_output
        token_ids = sequence.tokens[:-1] if leaves_end_out else sequence.tokens
        return dataclasses.replace(sequence, text=self.codec.decode(token_ids))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Let later prompts use no blocks that were cached for earlier prompts, also in stores behind the KV cache.

        The old blocks are evicted when room is needed. Running requests keep their blocks, whatever the arguments are.

        Returns:
            True.
        """
        self.session.reset_prefix_cache()
        return True

    def get_metrics(self) -> list[Metric]:
        """Return numbers of requests, tokens and steps so far, and distributions of latencies, of each replica."""
        return metrics_of(self.session)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start to record the operations of this process with torch's profiler. `stop_profile` writes the trace.

        Args:
            profile_prefix: no effect.

        Raises:
            SettingsError: `profiler_config` is not set, ranks run in other processes, or a trace is being recorded.
        """
        self._profiler.start(self.config)

    def stop_profile(self) -> None:
        """Write the trace since `start_profile` into the folder of `profiler_config`.

        Raises:
            SettingsError: the trace cannot be written.
        """
        self._profiler.stop()

    @functools.cached_property
    def llm_engine(self) -> LLMEngine:
        """The engine, for callers who run its steps. Its requests share steps with the requests of this object."""
        return LLMEngine.of_session(self.session, self._texts)

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
        """Render a conversation as a prompt for `generate` or `stream`.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            chat_template: Jinja template; None: the checkpoint's template.
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: end the prompt with the tokens that begin an answer.
            continue_final_message: end the prompt after the content of the last message, for an answer that continues
                it; `add_generation_prompt` then has no effect.
            chat_template_kwargs: further variables of the template, such as {"enable_thinking": False} for Qwen3.

        Raises:
            RequestError: an argument is malformed, or there is no tokenizer or chat template.
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

    @property
    def has_chat_template(self) -> bool:
        return self.codec is not None and self.codec.has_chat_template

    def abort(self, request_id: str) -> None:
        """End the prompt in flight whose output has this `request_id`.

        The call that waits for this prompt returns the output so far.
        """
        self.session.abort(request_id)

    def expert_load(self) -> LoadWindow:
        """Return the tokens of each expert by layer, summed over all ranks, since the last call or the start.

        The result excludes steps in progress. This call also ends the current window of the load file and of metrics.

        Raises:
            SettingsError: the model has no experts.
            EngineError: the engine was shut down, or has failed.
        """
        self._require_experts()
        return self.session.expert_load()

    def save_placement(self, path: str | os.PathLike[str]) -> None:
        """Write the placement of experts to a file, for `rebalance=path` of an engine with equal numbers of ranks and
        slots.

        Raises:
            SettingsError: the model has no experts, its experts are sliced, or the file cannot be written.
            EngineError: the engine was shut down, or has failed.
        """
        self._require_experts()
        if not self.config.experts.expert_parallel:
            raise SettingsError("every rank holds a slice of each expert (expert_parallel=False): nothing is placed")
        window = self.session.peek_expert_load()
        write_placements(Path(path), [Placement(slots, window.num_experts) for slots in window.logical_of_slot])

    def scale(self, data_parallel_size: int) -> None:
        """Change the number of replicas, and return once it has changed. Requests continue, also in other threads.

        On CPUs, new replicas load the model while the old ones serve, so there must be memory for both. On GPUs the old
        replicas are stopped first, and requests wait until the new ones have loaded. A Ctrl-C ends the call but not the
        change, which continues while another call generates.

        Args:
            data_parallel_size: the new number of replicas; the current number changes nothing.

        Raises:
            SettingsError: the model, the machine or another setting does not allow this number.
            ScalingInProgressError: another call is already changing the number.
            ScaleError: the new replicas could not be started, and the old ones still serve; or the engine failed
                during the change, and was handled according to `on_failure`.
            EngineError: the engine was shut down, or has failed.
        """
        changed = self.session.scale(data_parallel_size)
        while not changed.done():
            self.session.advance([], waits_for_others=True)
        changed.result()

    def shutdown(self) -> None:
        """End all requests and free the model. May be called twice.

        Calls in other threads return the output so far. A load file and metrics receive the last expert loads. A small
        helper process, which forks ranks, is kept for the next start until this Python process exits.
        """
        self.session.shutdown()
        wait_for_cache_writers(cancelled_only=True)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise vllm_calls.missing_attribute("LLM", name)

    def _require_experts(self) -> None:
        if not self._has_experts:
            raise SettingsError(f"the model in {self.config.weights.model_path} has no experts")
