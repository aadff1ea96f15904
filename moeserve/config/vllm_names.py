"""Settings of vLLM that have another name or no effect here: translated, ignored with a warning, or refused."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moeserve.config.settings import PositiveInt, setting
from moeserve.errors import SettingsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """Names of vLLM, for scripts written for it"""

    distributed_executor_backend: Literal["uni", "mp", "ray"] | None = setting(None, "the same as executor")
    kv_cache_memory_bytes: int | None = setting(None, "the same as kv_cache_memory")
    swap_space: float | None = setting(0, "no effect: preempted requests are computed again")
    trust_remote_code: bool = setting(False, "must be off: code of a checkpoint is never run")
    enable_expert_parallel: bool | None = setting(None, "the same as expert_parallel, true or false")
    enable_chunked_prefill: bool | None = setting(True, "no effect: long prompts are always computed in chunks")
    enable_eplb: bool = setting(False, 'no effect: experts are rebalanced with rebalance="auto"')
    all2all_backend: str | None = setting(None, "no effect: the exchange is chosen with dispatcher")
    enable_dbo: bool = setting(False, "two-batch overlap, from the numbers of tokens in the next two settings")
    dbo_decode_token_threshold: PositiveInt = setting(32, "with enable_dbo: the same as overlap_decode_tokens")
    dbo_prefill_token_threshold: PositiveInt = setting(512, "with enable_dbo: the same as overlap_prefill_tokens")
    disable_log_stats: bool = setting(True, "no effect: only a server logs statistics; see log_stats_interval")


NAMES = frozenset(field.name for field in dataclasses.fields(VllmSettings))

OWN_NAMES = {
    "distributed_executor_backend": "executor",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "enable_expert_parallel": "expert_parallel",
}
_OF_DBO = {
    "dbo_decode_token_threshold": "overlap_decode_tokens",
    "dbo_prefill_token_threshold": "overlap_prefill_tokens",
}


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of moeserve for options named as in vLLM. Log a warning for each option without effect.

    Raises:
        SettingsError: trust_remote_code=True.
    """
    translated: dict[str, Any] = {}
    for field in dataclasses.fields(VllmSettings):
        value = options.get(field.name)
        if field.name in _OF_DBO:
            if options.get("enable_dbo"):
                translated[_OF_DBO[field.name]] = field.default if value is None else value
            continue
        if value is None or value == field.default or field.name == "enable_dbo":
            continue
        if field.name == "trust_remote_code":
            raise SettingsError(
                "trust_remote_code=True: moeserve never runs the code of a checkpoint; leave the setting out"
            )
        if field.name in OWN_NAMES:
            translated[OWN_NAMES[field.name]] = "uniproc" if value == "uni" else value
        else:
            logger.warning("%s=%r has %s", field.name, value, field.metadata["help"])
    return translated
