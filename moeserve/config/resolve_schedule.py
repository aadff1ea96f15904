"""Resolution of the limits of requests and steps, and of speculative decoding."""

from __future__ import annotations

from moeserve.config.engine_config import ScheduleConfig
from moeserve.config.facts import Facts, from_settings
from moeserve.config.settings import Settings, SpeculativeConfig
from moeserve.config.validation import parse_length
from moeserve.errors import SettingsError

TOKENS_WITH_EXPERTS_ON_DISK = 8192  # of a chunk, which reads each expert once


def resolve_schedule(settings: Settings, facts: Facts) -> ScheduleConfig:
    """Return the limits of requests and steps.

    Raises:
        SettingsError: the model does not support the settings.
    """
    scheduler, speculation = settings.scheduler, settings.scheduler.speculative_config
    longest = parse_length("max_model_len", settings.model.max_model_len)
    most = facts.checkpoint.max_position_embeddings
    if longest is not None and longest > most:
        raise SettingsError(
            f"max_model_len={longest} is more than the model's longest context ({most} tokens); choose at most that"
        )
    if speculation is not None:
        _check_speculation(speculation, settings, facts)
    # Planning ahead needs ranks that know the tokens they sample. With pipeline stages, the last stage samples the
    # tokens that the first stage needs. With draft tokens, even the number of new tokens is unknown.
    num_stages = settings.parallel.pipeline_parallel_size
    plans_ahead = scheduler.async_scheduling and num_stages == 1 and speculation is None
    return from_settings(
        ScheduleConfig,
        scheduler,
        max_model_len=longest or most,
        max_model_len_may_shrink=longest is None,
        max_num_seqs=scheduler.max_num_seqs or facts.device.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens or _most_tokens(settings, facts),
        max_num_batched_tokens_may_shrink=scheduler.max_num_batched_tokens is None,
        async_scheduling=plans_ahead,
        longest_turn_wait=scheduler.expert_turn_wait if settings.model.expert_memory is not None else 0.0,
        max_concurrent_batches=scheduler.max_concurrent_batches or (2 if plans_ahead else num_stages),
    )


def _most_tokens(settings: Settings, facts: Facts) -> int:
    """Return the default of max_num_batched_tokens. With experts on disk, ranks lower it if memory is short."""
    default = facts.device.max_num_batched_tokens
    return default if settings.model.expert_memory is None else max(default, TOKENS_WITH_EXPERTS_ON_DISK)


def _check_speculation(speculation: SpeculativeConfig, settings: Settings, facts: Facts) -> None:
    """Raise SettingsError if the model does not support the draft method."""
    checkpoint = facts.checkpoint
    if speculation.prompt_lookup_min > speculation.prompt_lookup_max:
        raise SettingsError(
            f"speculative_config: prompt_lookup_min={speculation.prompt_lookup_min} is more than "
            f"prompt_lookup_max={speculation.prompt_lookup_max}; lower prompt_lookup_min"
        )
    if checkpoint.needs.redoes_drafts and facts.on_gpu:
        raise SettingsError(
            "speculative_config: on GPUs, the kernels for compressed entries would keep the state of rejected draft "
            "tokens; leave it out or use device='cpu'"
        )
    if checkpoint.needs.redoes_drafts and settings.parallel.has_overlap:
        raise SettingsError(
            "speculative_config: with overlap_decode_tokens or overlap_prefill_tokens, draft tokens could be in both "
            "halves of a step, and this model keeps no state after the first of them; leave one of the settings out"
        )
    if speculation.method == "mtp" and not checkpoint.num_draft_layers:
        raise SettingsError(
            "speculative_config: method='mtp' needs modules for multi-token prediction (MTP), and "
            f"{checkpoint.path or 'the default model'} has no supported ones; use method='ngram'"
        )
