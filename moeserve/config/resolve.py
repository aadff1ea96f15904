"""Resolution of settings to an `EngineConfig`: every "auto" is resolved, and contradictory settings are refused."""

from __future__ import annotations

from moeserve.config.devices import DEVICES
from moeserve.config.engine_config import EngineConfig, FailureConfig, ParallelConfig, TelemetryConfig, TextConfig
from moeserve.config.facts import CheckpointFacts, Facts, MachineFacts, from_settings
from moeserve.config.resolve_cache import resolve_cache, resolve_store
from moeserve.config.resolve_compute import check_device, resolve_compute
from moeserve.config.resolve_experts import resolve_experts
from moeserve.config.resolve_parallel import resolve_parallel
from moeserve.config.resolve_schedule import resolve_schedule
from moeserve.config.resolve_weights import resolve_weights
from moeserve.config.settings import DEFAULT_LOAD_WINDOW, ModelSettings, Settings
from moeserve.errors import SettingsError


def resolve(
    settings: Settings,
    checkpoint: CheckpointFacts,
    machine: MachineFacts,
    *,
    expert_loads: tuple[tuple[float, ...], ...] = (),
    placements: tuple[str, ...] = (),
) -> EngineConfig:
    """Return the engine's config for these settings.

    Args:
        expert_loads: contents of the file `settings.parallel.expert_loads`: for each sparse layer, the load of each
            expert.
        placements: contents of the placement file that `settings.parallel.rebalance` names, for each sparse layer.

    Raises:
        SettingsError: the settings contradict each other, the checkpoint or the machine.
    """
    facts = Facts(checkpoint, machine, DEVICES["cpu" if settings.model.device == "auto" else settings.model.device])
    weights = resolve_weights(settings, facts)
    check_device(settings.model, facts, weights)
    parallel = resolve_parallel(settings.parallel, facts)
    schedule = resolve_schedule(settings, facts)
    cache = resolve_cache(settings.cache, facts, schedule)
    return EngineConfig(
        weights=weights,
        texts=resolve_texts(settings.model, facts),
        compute=resolve_compute(settings, facts, weights, cache, parallel),
        cache=cache,
        store=resolve_store(settings.cache),
        schedule=schedule,
        parallel=parallel,
        experts=resolve_experts(settings, facts, weights, schedule, expert_loads, placements),
        failure=resolve_failure(settings, parallel),
        telemetry=resolve_telemetry(settings, facts),
    )


def resolve_texts(model: ModelSettings, facts: Facts) -> TextConfig:
    """Return the tokenizer, the defaults of sampling parameters, and the form of log-probabilities."""
    return TextConfig(
        tokenizer_path=model.tokenizer or facts.checkpoint.path,
        hub_tokenizer=None,
        vocab_size=facts.checkpoint.vocab_size,
        has_generation_config=model.generation_config == "auto",
        override_generation_config=tuple((model.override_generation_config or {}).items()),
        logprobs_mode=model.logprobs_mode,
    )


def resolve_failure(settings: Settings, layout: ParallelConfig) -> FailureConfig:
    """Return the limits of time, and what follows a failure."""
    parallel = settings.parallel
    on_failure = parallel.on_failure
    if on_failure == "auto":
        if layout.executor == "uniproc":
            on_failure = "end"
        else:
            on_failure = "recover" if layout.executor == "mp" and layout.num_ranks > 1 else "restart"
    debug_rank_state = settings.scheduler.debug_rank_state
    return from_settings(FailureConfig, parallel, on_failure=on_failure, debug_rank_state=debug_rank_state)


def resolve_telemetry(settings: Settings, facts: Facts) -> TelemetryConfig:
    """Return the reports of expert load.

    Raises:
        SettingsError: the model has no experts.
    """
    telemetry = settings.telemetry
    reports = telemetry.expert_load_file, telemetry.metrics_port
    is_needed = settings.parallel.rebalance == "auto" or reports != (None, None)
    if is_needed and not facts.checkpoint.num_sparse_layers:
        raise SettingsError(
            "rebalance, expert_load_file and metrics_port need a model with experts, and this one has none"
        )
    window = telemetry.expert_load_window or (DEFAULT_LOAD_WINDOW if is_needed else 0)
    return from_settings(TelemetryConfig, telemetry, expert_load_window=window)
