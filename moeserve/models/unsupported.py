"""The errors for models that moeserve does not serve: dense models, and MoE models of unknown architectures."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moeserve.errors import CheckpointError, near_names, shown
from moeserve.models.config_values import ConfigValues
from moeserve.models.dense import upcycle_refusal

_EXPERTS_KEY = re.compile("expert|moe", re.IGNORECASE)
_LIST = "the README lists the supported architectures"


def unsupported(config: ConfigValues, architecture: str, known: Iterable[str]) -> CheckpointError:
    """Return the error for a config.json whose architecture is not served.

    Args:
        config: the values of the whole file.
        known: names of the architectures that are served.
    """
    if not has_experts(config.values):
        refusal = upcycle_refusal(config)
        return dense_model(config.path, architecture, config.path.parent, refusal)
    others = "model_impl='transformers' runs other MoE models through transformers' code"
    return _unknown(config.path, architecture, known, others)


def dense_model(file: Path, architecture: str, checkpoint: Path, refusal: str | None) -> CheckpointError:
    """Return the error for a model without experts.

    Args:
        file: the file that describes the model.
        checkpoint: the argument of `moeserve upcycle` for this model.
        refusal: why `moeserve upcycle` would refuse the model; None: it would not.
    """
    what = f"{file}: {architecture} is a dense model, and moeserve serves mixture-of-experts (MoE) models"
    if refusal is not None:
        return CheckpointError(
            f"{what}; `moeserve upcycle`, which makes MoE models of dense ones, refuses it: {refusal}"
        )
    out = f"{checkpoint.stem if checkpoint.is_file() else checkpoint.resolve().name}-moe"
    command = shlex.join(["moeserve", "upcycle", str(checkpoint), out])
    return CheckpointError(f"{what}; this command makes a Mixtral model with the same outputs of it: {command}")


def unknown_in_gguf(file: Path, architecture: object, known: Iterable[str]) -> CheckpointError:
    """Return the error for a GGUF file that holds an MoE model of an architecture that moeserve does not serve."""
    return _unknown(file, architecture, known, "other MoE models may be served from safetensors")


def has_experts(values: dict[str, Any]) -> bool:
    """Return True if a config, or a config nested in it, describes a model with several experts."""
    return any(
        has_experts(value)
        if isinstance(value, dict)
        else bool(_EXPERTS_KEY.search(key)) and value not in (None, False, 0, 1, [], "")
        for key, value in values.items()
    )


def _unknown(file: Path, architecture: object, known: Iterable[str], others: str) -> CheckpointError:
    # Compare names without their ends, such as ForCausalLM, which unrelated names share.
    by_stem: dict[str, list[str]] = {}
    for name in sorted(known):
        by_stem.setdefault(_stem(name), []).append(name)
    near = [name for stem in near_names(_stem(str(architecture)), by_stem) for name in by_stem[stem]]
    hint = f" (near: {', '.join(near)})" if near else ""
    return CheckpointError(f"{file}: architecture {shown(architecture)} is not supported{hint}; {_LIST}; {others}")


def _stem(architecture: str) -> str:
    return re.sub("(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$", "", architecture, flags=re.IGNORECASE)
