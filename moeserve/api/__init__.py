"""The public Python interface: `LLM`, prompts, tokenizers, and the text of outputs."""

from moeserve.config.allocation import require_room_for_torch

require_room_for_torch()  # before a module of this package imports torch
