"""Settings of vLLM that have another name here, or no effect: translated, accepted with a warning, or refused."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from moeserve.config.settings import setting
from moeserve.errors import SettingsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """Names of vLLM, for scripts written for it"""

    distributed_executor_backend: Literal["uni", "mp", "ray"] | None = setting(None, "the same as --executor")
    kv_cache_memory_bytes: int | None = setting(None, "the same as --kv-cache-memory")
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = setting(
        None, "no effect: a profiling run sizes the KV cache, or --kv-cache-memory"
    )
    swap_space: float | None = setting(None, "no effect: preempted requests are computed again")
    trust_remote_code: bool = setting(False, "must be off: code of a checkpoint is never run")
    enable_expert_parallel: bool = setting(True, "no effect: experts are always spread over all ranks")
    enable_chunked_prefill: bool | None = setting(None, "no effect: long prompts are always computed in chunks")
    enable_eplb: bool = setting(False, 'no effect: experts are rebalanced with rebalance="auto"')
    all2all_backend: str | None = setting(None, "no effect: the exchange is chosen with dispatcher")
    disable_log_stats: bool = setting(True, "no effect: statistics are never logged; see --metrics-port")
    revision: str | None = setting(None, "no effect: a model is a local folder")


NAMES = frozenset(field.name for field in dataclasses.fields(VllmSettings))

_EXECUTORS = {"uni": "uniproc", "mp": "mp", "ray": "ray"}
# Values that mean what moeserve does anyway, so that there is nothing to warn of.
_VALUES_WITHOUT_WARNING: dict[str, tuple[Any, ...]] = {
    "gpu_memory_utilization": (None,),
    "swap_space": (None, 0),
    "enable_expert_parallel": (True,),
    "enable_chunked_prefill": (None, True),
    "enable_eplb": (False,),
    "all2all_backend": (None,),
    "disable_log_stats": (True,),
    "revision": (None,),
}


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of moeserve for options named as in vLLM. Logs a warning for each that has no effect.

    Raises:
        SettingsError: trust_remote_code=True.
    """
    translated: dict[str, Any] = {}
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(VllmSettings)}
    for name, value in options.items():
        if name == "distributed_executor_backend":
            if value is not None:
                translated["executor"] = _EXECUTORS[value]
        elif name == "kv_cache_memory_bytes":
            if value is not None:
                translated["kv_cache_memory"] = value
        elif name == "trust_remote_code":
            if value:
                raise SettingsError(
                    "trust_remote_code=True: moeserve never runs the code of a checkpoint; leave the setting out"
                )
        elif value not in _VALUES_WITHOUT_WARNING[name]:
            logger.warning("%s=%r has %s", name, value, helps[name])
    return translated
