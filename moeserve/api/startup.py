"""Start of a session: collect facts of the checkpoint and the machine, resolve settings, and load the model."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from moeserve.api import default_model
from moeserve.api.frontend import Frontend
from moeserve.api.session import Session
from moeserve.api.tokenizer import TextCodec
from moeserve.config.engine_config import EngineConfig
from moeserve.config.environment import openmp_threads
from moeserve.config.facts import CheckpointFacts, MachineFacts
from moeserve.config.hub_name import HubModel, parse_hub_name
from moeserve.config.resolve import resolve
from moeserve.config.resolve_parallel import threads_per_rank, wants_ray
from moeserve.config.settings import DEFAULT_LOAD_WINDOW, ModelSettings, ParallelSettings, Settings
from moeserve.engine.base import EngineClient
from moeserve.engine.engine import Engine
from moeserve.engine.launcher import Launcher
from moeserve.errors import CheckpointError, EngineError, RequestError, SettingsError, missing_extra, shown
from moeserve.executor.hosts.options import host_options
from moeserve.executor.hosts.pool import HostPool
from moeserve.layers.moe.placement.placement import read_loads, read_placements
from moeserve.machine import usable_cores
from moeserve.models import registry
from moeserve.models.checkpoint.model_files import find_model, find_tokenizer
from moeserve.ops.native import native_kernels
from moeserve.ops.select import has_triton, supports_bfloat16_products, supports_float8_products
from moeserve.processes.streams import open_closed_streams
from moeserve.sampling_params import SamplingParams
from moeserve.telemetry.observer import LoadObserver
from moeserve.worker.grammars import grammars_of

if TYPE_CHECKING:
    from moeserve.executor.ray.cluster import Cluster

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextParts:
    """The parts of a checkpoint that are used outside the engine."""

    codec: TextCodec | None  # None: the checkpoint has no tokenizer
    default_params: SamplingParams
    eos_token_ids: list[int]


@dataclass(frozen=True)
class StartedEngine:
    """A running engine, the observer of its expert loads, and the checkpoint's other parts."""

    engine: EngineClient
    observer: LoadObserver
    texts: TextParts
    has_experts: bool

    def open_session(self) -> Session:
        """Return a session, which takes ownership of the engine."""
        return open_session(self.engine, self.observer, self.texts)


def tokenizer_of(codec: TextCodec | None) -> Any:
    """Return the tokenizer of a checkpoint as a transformers object.

    Raises:
        SettingsError: there is no tokenizer, or transformers is not installed.
    """
    if codec is None:
        raise SettingsError("there is no tokenizer; name the folder of one as tokenizer")
    return codec.of_transformers


def start_engine(settings: Settings, *, show_progress: bool, reports_load: bool = False) -> StartedEngine:
    """Start the engine that the settings describe.

    All checks that need no weights are made first, even before the default model is built or weights are fetched.

    Args:
        reports_load: collect expert loads at intervals, if the model has experts.

    Raises:
        SettingsError, CheckpointError, EngineError: as for `LLM`.
    """
    open_closed_streams()
    settings = _with_seed(settings)
    overrides = settings.model.hf_overrides
    model = settings.model.model
    if model is None and overrides:  # the facts about the default model are those of its unchanged config.json
        model = str(default_model.default_model(show_progress))
    files = None
    if model is not None:
        files = find_model(model, revision=settings.model.revision, download_dir=settings.model.download_dir)
    tokenizer, hub_tokenizer = _find_tokenizer(settings.model)
    settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, tokenizer=tokenizer))
    facts = default_model.FACTS if files is None else _facts_of(files.describe(), settings)
    if reports_load and facts.num_sparse_layers and settings.telemetry.expert_load_window is None:
        telemetry = dataclasses.replace(settings.telemetry, expert_load_window=DEFAULT_LOAD_WINDOW)
        settings = dataclasses.replace(settings, telemetry=telemetry)
    with contextlib.ExitStack() as cleanup:
        cluster = _find_hosts(settings.parallel)
        if cluster is not None:
            cleanup.callback(cluster.close)
        config = _resolve(settings, facts, cluster)
        if cluster is None:
            _warn_of_fewer_threads(settings.parallel, config.compute.num_threads)
        codec = TextCodec.load(config.texts.tokenizer_path) if config.texts.tokenizer_path else None
        path = facts.path
        if files is None:
            path = str(default_model.default_model(show_progress))
        elif files.hub_model is not None and config.weights.load_format != "dummy":
            fetched = files.fetch(shows_progress=show_progress)
            path = registry.read_facts(fetched, settings.model.model_impl, hf_overrides=overrides).path
        config = config.changed(
            weights={"model_path": path, "hub_model": None if files is None else files.hub_model},
            texts={"tokenizer_path": tokenizer or path, "hub_tokenizer": hub_tokenizer},
        )
        texts = read_texts(config, codec)
        load_file = config.telemetry.expert_load_file
        observer = LoadObserver(None if load_file is None else Path(load_file), config.telemetry.metrics_port)
        cleanup.callback(observer.close)

        def config_of(num_replicas: int) -> EngineConfig:
            return _config_of(num_replicas, config, settings, facts, cluster)

        launcher = _launcher(config.parallel.executor, cluster, show_progress=show_progress)
        engine = Engine(config, launcher, config_of=config_of)
        cleanup.pop_all()
        return StartedEngine(engine, observer, texts, has_experts=facts.num_sparse_layers > 0)


def _warn_of_fewer_threads(parallel: ParallelSettings, num_threads: int) -> None:
    """Log a warning if OMP_NUM_THREADS limits the threads of ranks on this host."""
    if parallel.num_threads is None and num_threads < threads_per_rank((usable_cores(),), parallel):
        logger.warning(
            "each rank uses num_threads=%d, because OMP_NUM_THREADS is set; set num_threads to use more", num_threads
        )


def _with_seed(settings: Settings) -> Settings:
    """Return the settings with a random seed, if the user wants one."""
    if settings.model.seed is not None:
        return settings
    seed = secrets.randbits(31)
    logger.warning("seed=None: seed=%d was chosen at random; LLM(seed=%d) repeats the outputs", seed, seed)
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, seed=seed))


def _facts_of(folder: Path, settings: Settings) -> CheckpointFacts:
    model, drafting = settings.model, settings.scheduler.speculative_config
    num_drafts = 0 if drafting is None or drafting.method != "mtp" else drafting.num_speculative_tokens
    return registry.read_facts(folder, model.model_impl, num_drafts=num_drafts, hf_overrides=model.hf_overrides)


def _find_tokenizer(model: ModelSettings) -> tuple[str | None, HubModel | None]:
    """Return the folder of the tokenizer that the user named, and its repository if it is in a hub.

    Both are None if the user named no tokenizer, so that the tokenizer is the model's own.
    """
    name = model.tokenizer
    if name is None and model.tokenizer_revision is not None and model.model is not None:
        hub_model = parse_hub_name(model.model)
        name = None if hub_model is None else hub_model.repository
    if name is None:
        return None, None
    folder, hub_model = find_tokenizer(name, revision=model.tokenizer_revision, download_dir=model.download_dir)
    return str(folder), hub_model


def _resolve(settings: Settings, facts: CheckpointFacts, cluster: Cluster | HostPool | None) -> EngineConfig:
    return resolve(
        settings,
        facts,
        _machine_facts(cluster),
        expert_loads=_read_expert_loads(settings.parallel.expert_loads, facts),
        placements=_read_placements(settings.parallel, facts),
    )


def _config_of(
    num_replicas: int,
    config: EngineConfig,
    settings: Settings,
    facts: CheckpointFacts,
    cluster: Cluster | HostPool | None,
) -> EngineConfig:
    """Return the config of an engine with the same settings, but another number of replicas.

    Args:
        config: the config of the first start. Its executor is kept, and on several hosts its number of threads.

    Raises:
        SettingsError: the checkpoint, the machine or another setting does not allow this number.
    """
    if type(num_replicas) is not int or num_replicas < 1:
        raise SettingsError(f"data_parallel_size={shown(num_replicas)} must be a whole number of replicas, at least 1")
    parallel = dataclasses.replace(
        settings.parallel, data_parallel_size=num_replicas, executor=config.parallel.executor
    )
    if cluster is not None:
        parallel = dataclasses.replace(parallel, num_threads=config.compute.num_threads)
    resized = _resolve(dataclasses.replace(settings, parallel=parallel), facts, cluster)
    files = {"model_path": config.weights.model_path, "hub_model": config.weights.hub_model}
    return dataclasses.replace(resized.changed(weights=files), texts=config.texts)


def read_texts(config: EngineConfig, codec: TextCodec | None = None) -> TextParts:
    """Read a checkpoint's tokenizer, unless it is given, and its default sampling parameters and end tokens.

    Raises:
        CheckpointError: the tokenizer or generation_config.json cannot be used.
        SettingsError: override_generation_config has a wrong value.
    """
    weights, texts = config.weights, config.texts
    codec = codec or TextCodec.load(texts.tokenizer_path)
    defaults = registry.read_generation_defaults(weights.model_path, weights.hf_overrides)
    try:
        default_params = SamplingParams(**defaults.sampling) if texts.has_generation_config else SamplingParams()
    except RequestError as error:
        raise CheckpointError(f"{weights.model_path}: generation_config.json: {error}") from None
    try:
        default_params = dataclasses.replace(default_params, **dict(texts.override_generation_config))
    except RequestError as error:
        raise SettingsError(f"override_generation_config: {error}") from None
    eos_token_ids = sorted({*defaults.eos_token_ids, *(codec.eos_token_ids if codec else [])})
    return TextParts(codec, default_params, eos_token_ids)


def open_session(engine: EngineClient, observer: LoadObserver, texts: TextParts) -> Session:
    """Return a session, which takes ownership of the engine."""
    config = engine.config
    frontend = Frontend(
        texts.codec,
        vocab_size=config.texts.vocab_size,
        max_model_len=config.schedule.max_model_len,
        eos_token_ids=texts.eos_token_ids,
        engine_seed=config.weights.seed,
        num_replicas=config.parallel.data_parallel_size,
        grammars=None if texts.codec is None else grammars_of(config.texts.tokenizer_path, config.texts.vocab_size),
        kv_block_size=None if config.store.kv_transfer_address is None else config.cache.block_size,
        routes=config.experts.routes,
    )
    return Session(engine, frontend, observer, max_requests=lambda: engine.config.max_requests_in_flight)


def _machine_facts(cluster: Cluster | HostPool | None) -> MachineFacts:
    return MachineFacts(
        has_cuda=torch.cuda.is_available(),
        num_cores=usable_cores(),
        max_threads=openmp_threads(),
        num_gpus=torch.cuda.device_count(),
        has_nccl=torch.distributed.is_nccl_available(),
        has_kernels=native_kernels() is not None,
        has_triton=has_triton(),
        has_bfloat16=supports_bfloat16_products(),
        has_float8=supports_float8_products(),
        cores_of_nodes=None if cluster is None else cluster.cores_of_nodes(),
    )


def _find_hosts(parallel: ParallelSettings) -> Cluster | HostPool | None:
    """Return the hosts that run the ranks; None if only this host does.

    Raises:
        SettingsError, EngineError: as for `_find_cluster`; or other hosts cannot join, or do not join in time.
    """
    options = host_options(parallel)
    if options is None:
        return _find_cluster(parallel)
    if options.number:
        raise SettingsError(
            f"node_rank={options.number}: only the host with node_rank=0 has the engine; run `moeserve serve` with the "
            "same nnodes, master_addr and cluster_key_file on the others"
        )
    hosts = HostPool(options)
    try:
        hosts.wait_for_all()
    except BaseException:
        hosts.close()
        raise
    return hosts


def _find_cluster(parallel: ParallelSettings) -> Cluster | None:
    """Return the Ray cluster that runs the ranks; None if ranks do not run in Ray.

    Raises:
        SettingsError: executor='ray', but Ray is not installed.
        EngineError: executor='ray', but the cluster cannot be used.
    """
    if not wants_ray(parallel, usable_cores()):
        return None
    is_required = parallel.executor == "ray"
    try:
        from moeserve.executor.ray.cluster import Cluster  # imports ray, which may not be installed
    except ImportError as error:
        if not is_required:
            logger.warning("ranks run on this host, because Ray is not installed: %s", error)
            return None
        raise missing_extra("executor='ray' needs Ray", "ray", error) from None
    try:
        return Cluster(may_start=is_required)
    except EngineError as error:
        if is_required:
            raise
        logger.warning("ranks run on this host: %s", error)
        return None


def _launcher(
    executor: Literal["uniproc", "mp", "ray"], cluster: Cluster | HostPool | None, *, show_progress: bool
) -> Launcher:
    """Return the launcher of the replicas. Its module is imported only here, because Ray may not be installed."""
    if executor == "uniproc":
        from moeserve.engine.local_replica import ThreadLauncher

        return ThreadLauncher(show_progress=show_progress)
    if executor == "mp":
        from moeserve.engine.process_launcher import ProcessLauncher

        assert cluster is None or isinstance(cluster, HostPool)
        return ProcessLauncher(cluster, show_progress=show_progress)
    from moeserve.engine.ray_launcher import RayLauncher

    assert not isinstance(cluster, HostPool | None)
    return RayLauncher(cluster, show_progress=show_progress)


def _read_expert_loads(path: str | None, facts: CheckpointFacts) -> tuple[tuple[float, ...], ...]:
    """Read the expert loads once, so that all ranks use the same."""
    if path is None:
        return ()
    return read_loads(Path(path), num_layers=facts.num_sparse_layers, num_experts=facts.num_experts)


def _read_placements(parallel: ParallelSettings, facts: CheckpointFacts) -> tuple[str, ...]:
    if parallel.rebalance in ("off", "auto"):
        return ()
    path = Path(parallel.rebalance)
    if not parallel.rebalance or not path.exists():
        raise SettingsError(
            f"rebalance={shown(parallel.rebalance)}: there is no such placement file; choose 'off', 'auto', or a "
            "file that LLM.save_placement wrote"
        )
    found = read_placements(
        path,
        num_layers=facts.num_sparse_layers,
        num_experts=facts.num_experts,
        num_ranks=parallel.num_expert_ranks,
        num_redundant=parallel.num_redundant_experts,
    )
    return tuple(placement.to_json() for placement in found)
