"""A name that TRL imports for its server mode, which needs GPUs."""

from typing import Any

from moeserve import SettingsError


def trainer_init(*arguments: Any, **options: Any) -> Any:
    """Refuse the server mode."""
    raise SettingsError("weights are not sent over NCCL; use vllm_mode='colocate', or moeserve.rl.WeightSender")
