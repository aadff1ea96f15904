"""`LLM`: the engine as a Python object. Owns an engine core and a frontend; moves news from one to the other."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from moeserve.api import default_model
from moeserve.api.frontend import Frontend, Prompt, Prompts
from moeserve.api.text import TextCodec
from moeserve.config.resolve import CheckpointFacts, MachineFacts, resolve, wants_ray
from moeserve.config.settings import EngineConfig, ParallelSettings, Settings
from moeserve.config.validation import parse_settings
from moeserve.engine.base import Engine
from moeserve.engine.core import EngineCore
from moeserve.engine.replicas import Replicas
from moeserve.engine.worker_group import start_local_group
from moeserve.errors import CheckpointError, EngineError, RequestError, SettingsError, shown
from moeserve.expert_placement.placement import Placement, read_loads, read_placements, write_placements
from moeserve.interrupts import interrupts_deferred
from moeserve.machine import usable_cores
from moeserve.models import registry
from moeserve.models.packed_cache_writer import wait_for_cache_writers
from moeserve.ops.cpu.native import native_kernels
from moeserve.ops.select import supports_float8_products
from moeserve.outputs import RequestOutput
from moeserve.sampling_params import SamplingParams
from moeserve.telemetry.expert_load import LoadWindow, summed
from moeserve.telemetry.observer import LoadObserver

if TYPE_CHECKING:
    from moeserve.executor.ray.cluster import Cluster

logger = logging.getLogger(__name__)


class LLM:
    """A model, ready to generate.

        with LLM("path/to/Mixtral") as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    Settings, with the names that vLLM gives them; `moeserve generate --help` describes each one:

    - model: `model` (none: a small default model, made once), `tokenizer`, `dtype`, `device`, `load_format`, `seed`,
      `max_model_len`
    - KV cache: `block_size`, `kv_cache_memory` (bytes, or a text like "512MiB"), `enable_prefix_caching`
    - scheduling: `max_num_seqs`, `max_num_batched_tokens`
    - parallelism: `tensor_parallel_size`, `data_parallel_size`, `pipeline_parallel_size`, `executor`, `dispatcher`,
      `num_redundant_experts`, `expert_loads`, `num_threads`, `collective_timeout`, `debug_collectives`

    One thread at a time may use it. Streams may be open while other calls run: they share every step.

    Raises:
        SettingsError: a setting is unknown, out of range, or does not fit the checkpoint or the machine.
        CheckpointError: the checkpoint is missing, damaged, or of a kind that is not served.
    """

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, show_progress: bool = True, **settings: Any
    ) -> None:
        """
        Args:
            model: folder of a checkpoint in Hugging Face layout; none: the default model.
            show_progress: draw progress bars, on a terminal, while making the default model and loading weights.
            settings: see the class.
        """
        wanted = parse_settings({"model": model, **settings})
        folder = wanted.model.model
        facts = default_model.FACTS if folder is None else registry.read_facts(folder)
        with contextlib.ExitStack() as undone:
            cluster = find_cluster(wanted.parallel)
            if cluster is not None:
                undone.callback(cluster.close)
            self._start(wanted, facts, cluster, show_progress)
            undone.pop_all()

    def _start(self, wanted: Settings, facts: CheckpointFacts, cluster: Cluster | None, show_progress: bool) -> None:
        config = resolve(
            wanted,
            facts,
            MachineFacts(
                has_cuda=torch.cuda.is_available(),
                num_cores=usable_cores(),
                num_gpus=torch.cuda.device_count(),
                has_nccl=torch.distributed.is_nccl_available(),
                has_kernels=native_kernels() is not None,
                has_float8=supports_float8_products(),
                cores_of_nodes=None if cluster is None else [node.cores for node in cluster.nodes()],
            ),
            expert_loads=_read_expert_loads(wanted.parallel.expert_loads, facts),
            placements=_read_placements(wanted.parallel, facts),
        )
        codec = None if wanted.model.tokenizer is None else TextCodec.load(config.tokenizer_path)
        folder = facts.path
        if wanted.model.model is None:  # made only now that the settings are known to fit it
            folder = str(default_model.default_model(show_progress))
            config = dataclasses.replace(config, model_path=folder, tokenizer_path=config.tokenizer_path or folder)
        defaults = registry.read_generation_defaults(folder)
        try:
            self._default_params = SamplingParams(**defaults.sampling)
        except RequestError as error:
            raise CheckpointError(f"{folder}: generation_config.json: {error}") from None
        self.codec = codec or TextCodec.load(config.tokenizer_path)
        self._has_experts = facts.num_sparse_layers > 0
        load_file = config.expert_load_file
        self._observer = LoadObserver(None if load_file is None else Path(load_file), config.metrics_port)
        self._load_since: LoadWindow | None = None  # the last call of `expert_load`
        self._errors: dict[str, str] = {}  # of prompts that the engine could not finish, until their call tells of it
        try:
            self.core: Engine = start_engine(config, cluster, show_progress=show_progress)
        except BaseException:
            self._observer.close()
            raise
        self.config = self.core.config
        self.frontend = Frontend(
            self.codec,
            vocab_size=config.vocab_size,
            max_model_len=self.config.max_model_len,
            eos_token_ids=sorted({*defaults.eos_token_ids, *(self.codec.eos_token_ids if self.codec else [])}),
            engine_seed=config.seed,
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where none is given: the checkpoint's generation_config.json."""
        return self._default_params

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, as many at a time as fit.

        Args:
            prompts: a text, a list of token ids, or {"prompt_token_ids": [...]} or {"prompt": "..."}; or a list of
                these. The dicts may have a "cache_salt": only prompts with equal salts share cached prefixes.
            sampling_params: one for all prompts, or one for each; none: `get_default_sampling_params()`.
            use_tqdm: draw a progress bar, on a terminal.

        Returns:
            One output for each prompt, in their order.

        Raises:
            RequestError: a prompt or a parameter cannot be served. Nothing was generated; the engine lives on.
            EngineError: a step failed: its requests have ended, and the engine lives on. Or, where there are several
                ranks, one of them died: all requests have ended, and the engine takes no more.
        """
        submissions = self.frontend.submit(
            prompts, self._default_params if sampling_params is None else sampling_params
        )
        prompt_ids = [submission.prompt_id for submission in submissions]
        try:
            with interrupts_deferred():
                for submission in submissions:
                    for request in submission.requests:
                        self.core.add(request)
            unfinished = set(prompt_ids)
            with tqdm(total=len(prompt_ids), desc="prompts", disable=None if use_tqdm else True) as progress:
                while unfinished:
                    finished = self._step() & unfinished
                    unfinished -= finished
                    assert not unfinished or self.core.has_work, "the engine has lost a request"
                    progress.update(len(finished))
            self._raise_error(prompt_ids)
            return [self.frontend.output(prompt_id) for prompt_id in prompt_ids]
        finally:
            self._discard(prompt_ids)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Completes one prompt, and gives its output, complete so far, whenever it has grown.

        Closing the iterator, or leaving it to the garbage collector, ends the request. Arguments and errors are those
        of `generate`; errors come with the first output.
        """
        params = self._default_params if sampling_params is None else sampling_params
        (submission,) = self.frontend.submit([prompt], params)
        num_tokens_shown = -1
        try:
            with interrupts_deferred():
                for request in submission.requests:
                    self.core.add(request)
            finished = False
            while not finished:
                finished = submission.prompt_id in self._step()
                output = self.frontend.output(submission.prompt_id)
                finished = finished or output.finished  # a step of another call may have ended it
                self._raise_error([submission.prompt_id])
                assert finished or self.core.has_work, "the engine has lost a request"
                num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
                if finished or num_tokens > num_tokens_shown:
                    num_tokens_shown = num_tokens
                    yield output
        finally:
            self._discard([submission.prompt_id])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of several, written by the checkpoint's chat template.

        Args:
            messages: [{"role": "user", "content": "..."}, ...], or a list of such lists.
            add_generation_prompt: end with the words that open an answer.
            chat_template_kwargs: what else the template is told, such as {"enable_thinking": False} for Qwen3.
            sampling_params, use_tqdm: as for `generate`.

        Raises:
            RequestError, EngineError: as `generate`; also where there is no chat template.
        """
        given: object = messages
        if isinstance(given, str):
            raise RequestError(f"messages={shown(given)} must be a list of messages; pass a text to generate")
        is_one = isinstance(messages, Mapping) or not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else messages
        prompts = [
            self.chat_prompt(
                each, add_generation_prompt=add_generation_prompt, chat_template_kwargs=chat_template_kwargs
            )
            for each in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def abort(self, request_id: str) -> None:
        """Ends a prompt in flight, named by its output's `request_id`. Its stream gives what there is, and stops."""
        for unfinished in self.frontend.unfinished(request_id):
            self.core.abort(unfinished)

    @property
    def has_chat_template(self) -> bool:
        return self.codec is not None and self.codec.has_chat_template

    def chat_prompt(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, list[int]]:
        """A conversation as a prompt for `generate` or `stream`. The arguments are those of `chat`."""
        if self.codec is None:
            raise RequestError("there is no tokenizer to write the messages with; name the folder of one as tokenizer")
        token_ids = self.codec.chat_prompt(
            messages, add_generation_prompt=add_generation_prompt, template_arguments=chat_template_kwargs
        )
        return {"prompt_token_ids": token_ids}

    def expert_load(self) -> LoadWindow:
        """What each expert of each layer was given, on all ranks, since the last call, or since the start.

        Steps that are under way are not waited for. A file or metrics have it too, in windows that end here at the
        latest.

        Raises:
            SettingsError: the model has no experts.
            EngineError: the engine was shut down, or has failed.
        """
        if not self._has_experts:
            raise SettingsError(f"the model in {self.config.model_path} has no experts, so there is no load to tell")
        total = self._collected_load()
        self._load_since = None
        return total

    def save_placement(self, path: str | os.PathLike[str]) -> None:
        """Writes which rank holds which experts, for `rebalance=path` of a later engine with as many ranks and slots.

        Raises:
            SettingsError: the model has no experts, or the file cannot be written.
            EngineError: the engine was shut down, or has failed.
        """
        if not self._has_experts:
            raise SettingsError(f"the model in {self.config.model_path} has no experts, so there is no placement")
        window = self._collected_load()
        placements = [Placement(slots, window.num_experts) for slots in window.logical_of_slot]
        write_placements(Path(path), placements)

    def shutdown(self) -> None:
        """Ends all requests and frees the model. May be called twice; afterwards only what was generated is there.

        Where a file or metrics want the load of experts, they are told the last of it.
        """
        if self._observer.is_enabled:
            with contextlib.suppress(EngineError):  # of an engine that has failed, or was shut down before
                self._collected_load()
        self._observer.close()
        self.core.shutdown()
        wait_for_cache_writers(cancelled_only=True)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _step(self) -> set[str]:
        """Runs one step for all calls that are open. Returns the prompts that it finished."""
        finished = set()
        with interrupts_deferred():
            for update in self.core.step():
                news = self.frontend.update(update)
                if news is None:
                    continue
                if update.error is not None:
                    self._errors.setdefault(news.prompt_id, update.error)
                if news.abort_request_id is not None:
                    self.core.abort(news.abort_request_id)
                if news.finished:
                    finished.add(news.prompt_id)
            self._note_loads(self.core.take_loads())
        return finished

    def _collected_load(self) -> LoadWindow:
        """All since `expert_load` was last called, which goes on."""
        with interrupts_deferred():
            self.core.collect_load()
            self._note_loads(self.core.take_loads(wait=True))
        assert self._load_since is not None
        return self._load_since

    def _note_loads(self, windows: list[LoadWindow]) -> None:
        for window in windows:
            self._observer.observe(window)
            self._load_since = window if self._load_since is None else summed([self._load_since, window])

    def _raise_error(self, prompt_ids: list[str]) -> None:
        for prompt_id in prompt_ids:
            if prompt_id in self._errors:
                raise EngineError(self._errors[prompt_id])

    def _discard(self, prompt_ids: list[str]) -> None:
        with interrupts_deferred():
            for prompt_id in prompt_ids:
                self._errors.pop(prompt_id, None)
                for request_id in self.frontend.discard(prompt_id):
                    self.core.abort(request_id)


def find_cluster(parallel: ParallelSettings) -> Cluster | None:
    """The Ray cluster that runs the ranks, if Ray is to run them.

    Raises:
        SettingsError: Ray is asked for, and not installed.
        EngineError: the cluster cannot be used.
    """
    if not wants_ray(parallel, usable_cores()):
        return None
    is_asked_for = parallel.executor == "ray"
    try:
        from moeserve.executor.ray.cluster import Cluster  # brings ray, which is not always installed
    except ImportError as error:
        if not is_asked_for:
            logger.warning("ranks are run on this host, since Ray is not installed: %s", error)
            return None
        raise SettingsError(f"executor='ray' needs Ray ({error}): pip install 'moeserve[ray]'") from None
    try:
        return Cluster(may_start=is_asked_for)
    except EngineError as error:
        if is_asked_for:
            raise
        logger.warning("ranks are run on this host: %s", error)
        return None


def start_engine(config: EngineConfig, cluster: Cluster | None = None, *, show_progress: bool) -> Engine:
    """The engine that a config asks for, with its model loaded."""
    match config.executor:
        case "uniproc":
            return EngineCore(config, show_progress=show_progress)
        case "mp":
            return Replicas(config, lambda: start_local_group(config, show_progress=show_progress))
        case "ray":
            assert cluster is not None
            from moeserve.engine.ray_engine import ray_replicas

            return ray_replicas(config, cluster, show_progress=show_progress)


def _read_expert_loads(path: str | None, facts: CheckpointFacts) -> tuple[tuple[float, ...], ...]:
    """Here, once, so that all ranks are told the same."""
    if path is None:
        return ()
    return read_loads(Path(path), num_layers=facts.num_sparse_layers, num_experts=facts.num_experts)


def _read_placements(parallel: ParallelSettings, facts: CheckpointFacts) -> tuple[str, ...]:
    if parallel.rebalance in ("off", "auto"):
        return ()
    path = Path(parallel.rebalance)
    if not parallel.rebalance or not path.exists():
        raise SettingsError(
            f"rebalance={shown(parallel.rebalance)}: there is no such file of placements; choose 'off', 'auto', or a "
            f"file that LLM.save_placement wrote"
        )
    found = read_placements(
        path,
        num_layers=facts.num_sparse_layers,
        num_experts=facts.num_experts,
        num_ranks=parallel.tensor_parallel_size * parallel.data_parallel_size,
        num_redundant=parallel.num_redundant_experts,
    )
    return tuple(placement.to_json() for placement in found)


def _signature() -> inspect.Signature:
    """What `help(LLM)` and editors show: every setting by name, with its type and default."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = list(inspect.signature(LLM.__init__).parameters.values())[:-1]  # all but **settings
    for group in Settings.groups().values():
        for setting in dataclasses.fields(group):
            if setting.name != "model":
                parameters.append(
                    inspect.Parameter(setting.name, keyword, default=setting.default, annotation=setting.type)
                )
    return inspect.Signature(parameters)


LLM.__init__.__signature__ = _signature()  # type: ignore[attr-defined]
