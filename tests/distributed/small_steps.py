"""Changes the limit of small dispatch steps, in this process or in the ranks of an engine.

Test models are so narrow that all their steps would be small. With a limit of MIDDLE tokens most prefill steps are
large and decode steps of a few requests are small, so both paths run.

In the ranks of an engine tests/sitecustomize.py calls `plant`. This file is imported by tests and by ranks.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

MIDDLE = 8  # tokens of all ranks


def bytes_of_tokens(folder: str | Path, num_tokens: int, dtype: str = "float32") -> int:
    """Return the bytes of this many tokens in dispatch, as dispatchers count them."""
    from moeserve.config.expert_layout import BYTES_OF_DTYPE
    from moeserve.models.registry import describe

    experts = describe(folder).model.expert_shape
    assert experts is not None
    return num_tokens * experts.top_k * experts.hidden_size * BYTES_OF_DTYPE[dtype]


def border(max_small_bytes: int | None, note: Callable[[bool], None]) -> ExitStack:
    """Change the limit in this process until the end of the context. None: keep it.

    Args:
        note: called in each layer of several ranks, with true if the step was small.
    """
    from unittest import mock

    from moeserve.layers.moe.dispatch import all_to_all, allgather, shared_rows

    stack = ExitStack()
    dispatchers: list[Any] = [allgather.AllGatherDispatcher, all_to_all.AllToAllDispatcher]
    for dispatcher in (*dispatchers, shared_rows.SharedRowsDispatcher):

        def noted(self: Any, *step: Any, dispatch: Any = dispatcher.dispatch) -> Any:
            note(isinstance(self, allgather.AllGatherDispatcher) and self.is_small(*step))
            return dispatch(self, *step)

        stack.enter_context(mock.patch.object(dispatcher, "dispatch", noted))
    if max_small_bytes is not None:
        for name in ("ROWS_OF_PAIRS", "SUMS_OF_RANKS"):
            limits = dataclasses.replace(getattr(allgather, name), eager=max_small_bytes)
            stack.enter_context(mock.patch.object(allgather, name, limits))
    return stack


def check_ways(num_tokens: Sequence[int], ways: Sequence[bool], max_small_tokens: int | None) -> None:
    """Check that exactly the steps with few tokens were small, and that both kinds occurred at the limit MIDDLE.

    Args:
        num_tokens: of all ranks, by step.
        ways: by step and layer, true if it was small.
    """
    num_layers = len(ways) // len(num_tokens)
    expected = [
        max_small_tokens is None or total <= max_small_tokens for total in num_tokens for _ in range(num_layers)
    ]
    assert num_layers
    assert list(ways) == expected
    if max_small_tokens == MIDDLE:
        assert {*ways} == {False, True}


class PlantedBorder:
    """A limit for all ranks that are started from now on, and a record of their steps."""

    def __init__(self, folder: Path, max_small_bytes: int | None) -> None:
        """
        Args:
            folder: an empty one.
        """
        self.folder = folder
        (folder / "border.json").write_text(json.dumps(max_small_bytes))
        self.environment = {"MOESERVE_TEST_PLANT": f"small_steps:{folder}"}

    def ways(self) -> set[bool]:
        """Return the kinds of steps that any rank has run."""
        return {is_small for is_small in (False, True) if (self.folder / _file_name(is_small)).exists()}


def plant(name: str, folder: str) -> None:
    """Set the limit in a rank, for its whole life."""
    max_small_bytes = json.loads(Path(folder, "border.json").read_text())
    border(max_small_bytes, lambda is_small: Path(folder, _file_name(is_small)).touch())


def _file_name(is_small: bool) -> str:
    return "took-small" if is_small else "took-large"
