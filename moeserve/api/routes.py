"""The experts of tokens as arrays, and as the rows that the engine sends and receives."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.config.routes import RouteShape
from moeserve.errors import RequestError, shown

Routes = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


class OutputRoutes:
    """The experts of the tokens of one output and of its prompt, as generated so far."""

    def __init__(self, shape: RouteShape, num_prompt_tokens: int) -> None:
        """
        Args:
            num_prompt_tokens: number of prompt tokens whose experts the output returns.
        """
        self._shape, self._num_prompt_tokens = shape, num_prompt_tokens
        self._rows = bytearray()

    def add(self, rows: bytes) -> None:
        """Add the rows of an update."""
        self._rows += rows

    def array(self, num_output_tokens: int) -> Routes:
        """Return the experts [tokens, layers, top_k] of all tokens of the prompt and the output but the last."""
        num_rows = max(self._num_prompt_tokens + num_output_tokens - 1, 0)
        rows = bytes(self._rows[: num_rows * self._shape.row_bytes])
        array: Routes = np.frombuffer(rows, self._shape.dtype).reshape(-1, self._shape.num_layers, self._shape.top_k)
        return array


def rows_of_array(name: str, routes: Any, shape: RouteShape | None, num_tokens: int) -> bytes:
    """Return the rows of an array [num_tokens, layers, top_k] that a user has given.

    Raises:
        RequestError: the array has another shape, or names experts that a token cannot choose.
    """
    if shape is None:
        raise RequestError(
            "routed_experts need an engine with enable_return_routed_experts=True", parameter="routed_experts"
        )
    try:
        array = np.asarray(routes)
    except ValueError:  # lists of different lengths
        array = np.zeros(0)
    wanted = num_tokens, shape.num_layers, shape.top_k
    if array.shape != wanted or array.dtype.kind not in "iu":
        raise RequestError(
            f"{name}: routed_experts have shape {list(array.shape)} and dtype {array.dtype}; they must be integers "
            f"{list(wanted)}: tokens, layers, experts of a token",
            parameter="routed_experts",
        )
    sorted_TLK = np.sort(array[:, list(shape.layers)], axis=-1)
    if sorted_TLK.size and not (sorted_TLK.min() >= 0 and sorted_TLK.max() < shape.num_experts):
        wrong = sorted_TLK.min() if sorted_TLK.min() < 0 else sorted_TLK.max()
        raise RequestError(
            f"{name}: routed_experts name expert {shown(int(wrong))}; a layer has experts 0 to {shape.num_experts - 1}",
            parameter="routed_experts",
        )
    if (sorted_TLK[..., 1:] == sorted_TLK[..., :-1]).any():
        raise RequestError(
            f"{name}: routed_experts name an expert twice for one token and layer", parameter="routed_experts"
        )
    rows_TLK = np.zeros(wanted, shape.dtype)
    rows_TLK[:, list(shape.layers)] = array[:, list(shape.layers)]
    return rows_TLK.tobytes()
