"""Translates the names of a checkpoint's tensors to names that all families share, once, when it is opened."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re

from moeserve.errors import CheckpointError
from moeserve.models.checkpoint.shards import NUMBER, Checkpoint
from moeserve.models.family import DRAFT, Family, Names

logger = logging.getLogger(__name__)

LAYER = re.compile(r"(?<=\blayers\.)\d{1,9}(?=\.)")
PLACE = "\0"  # stands for a number, so that names that differ only in layer or expert are translated once
MAX_DIGITS = 10
AT_PLACE = re.compile(PLACE + r"(\+?)")  # a plus in a translation adds one to the number


class Translation:
    """Translates the names of tensors in the checkpoints of one family."""

    def __init__(self, family: Family, num_layers: int) -> None:
        """
        Args:
            num_layers: number of decoder layers, without layers for multi-token prediction.
        """
        self._family = family
        self._num_layers = num_layers
        self._of_form = functools.cache(self._translate_form)

    def __call__(self, name: str) -> str | None:
        """Return the translated name; None: the tensor does not belong to the decoder."""
        name = LAYER.sub(self._layer, name)
        if "mtp" in name or ".draft" in name:  # the translation contains the module's number
            return self._translate_form(name)
        numbers = iter(NUMBER.findall(name))
        form = self._of_form(NUMBER.sub(PLACE, name))
        return None if form is None else AT_PLACE.sub(lambda found: _number(next(numbers), found[1]), form)

    def _layer(self, match: re.Match[str]) -> str:
        """Return a decoder layer's number, or draft0, draft1 ... for the layers of multi-token prediction."""
        number = int(match[0])
        return match[0] if number < self._num_layers else f"draft{number - self._num_layers}"

    def _translate_form(self, form: str) -> str | None:
        family = self._family
        inner = _applied(family.wrapped, form)
        if inner.removeprefix("model.").startswith(family.left_out) or inner.startswith(family.left_out):
            return None
        return _applied((*family.names, *DRAFT), inner)


def _number(digits: str, plus: str) -> str:
    return str(int(digits) + 1) if plus and len(digits) < MAX_DIGITS else digits


def _applied(names: Names, name: str) -> str:
    for pattern, replacement in names:
        name = re.sub(pattern, replacement, name)
    return name


def translated(checkpoint: Checkpoint, family: Family, num_layers: int) -> Checkpoint:
    """Return the checkpoint with translated names, without tensors that do not belong to the decoder.

    Raises:
        CheckpointError: two tensors have the same translation.
    """
    translation = Translation(family, num_layers)
    stored_names: dict[str, str] = {}
    num_left_out = 0
    for stored in checkpoint.tensors:
        name = translation(stored)
        if name is None:
            num_left_out += 1
        elif name in stored_names:
            raise CheckpointError(
                f"{checkpoint.folder} holds the same tensor under two names, {stored_names[name]!r} and {stored!r}; "
                "keep one of them"
            )
        else:
            stored_names[name] = stored
    if num_left_out:
        logger.info("%s: %d tensors that are not the decoder's are not loaded", checkpoint.folder, num_left_out)
    tensors = {name: checkpoint.tensors[stored] for name, stored in stored_names.items()}
    return dataclasses.replace(checkpoint, tensors=tensors, stored_names=stored_names)
