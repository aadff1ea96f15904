"""The trainer's side of updates of a served model's weights."""

from moeserve.rl.weight_sender import WeightSender

__all__ = ["WeightSender"]
