"""Model families: reading their configurations, building the decoder, and loading its weights."""

from moeserve.config.allocation import require_room_for_torch

require_room_for_torch()  # before a module of this package imports torch
