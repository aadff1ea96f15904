"""The tensors of one step, which the worker builds from a plan and every layer reads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# T tokens of the step in S chunks, L entries of `logits_rows`, R rows whose logits are computed, W fields of
# SAMPLING_SETTINGS, K experts of a token, D values of a hidden state

# The sampling settings of a request. On a device, a record is stored as the bits of W integers.
SAMPLING_SETTINGS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("num_prompt_tokens", np.int64),
        ("seed", np.uint64),
    ]
)
NUM_SETTINGS = SAMPLING_SETTINGS.itemsize // 8


def as_integers(records: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the bits of records of `SAMPLING_SETTINGS` as [records, W] int64."""
    return records.view(np.int64).reshape(-1, NUM_SETTINGS)


class ChunkSpan(NamedTuple):
    """The rows of one chunk among the step's tokens, on the host, for loops and shapes."""

    first_row: int
    num_rows: int
    context_len: int  # number of positions up to the chunk's last row, including those computed before the chunk
    num_drafts: int = 0  # number of draft tokens at the end of the chunk

    @property
    def last_row(self) -> int:
        return self.first_row + self.num_rows - 1


class StateRows(NamedTuple):
    """The rows of the state caches that each chunk reads and writes; see `kv/state_pool.py`."""

    load_S: Tensor  # int64: the row with the state before the chunk; -1: zeros, at the start of a request
    store_S: Tensor  # int64: the row to which the state after the chunk is written; -1: none
    save_S: Tensor  # int64: the row to which a state within the chunk is copied; -1: none
    num_before_save_S: Tensor  # int64: number of the chunk's tokens that this copy includes, at least one

    @classmethod
    def none(cls, num_chunks: int, device: torch.device | None = None) -> StateRows:
        """Return the rows of chunks that neither load nor store a state."""
        rows = (torch.full((num_chunks,), row, dtype=torch.int64, device=device) for row in (-1, -1, -1, 1))
        return cls(*rows)


class GroupTable(NamedTuple):
    """Slots and block table of a cache group. `StepInputs` describes the fields."""

    cache_slots: Tensor
    block_table: Tensor  # entries of blocks that the request no longer reads are arbitrary

    @classmethod
    def none(cls, num_tokens: int, num_chunks: int, max_blocks: int, device: torch.device | None = None) -> GroupTable:
        """Return the table of a group to which nothing is written."""
        slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        return cls(slots, torch.zeros(num_chunks, max_blocks, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class StepInputs:
    """The tokens of one step, chunk after chunk. Tensors are on the device."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64: position of each token in its request
    cache_slots: Tensor  # [T] int64: block_id * block_size + offset of its key and value
    row_starts: Tensor  # [S + 1] int32: rows of chunk s are row_starts[s] to row_starts[s + 1] - 1
    context_lens: Tensor  # [S] int32
    block_table: Tensor  # [S, max_blocks] int32: block ids of each chunk's context; arbitrary beyond the context
    logits_rows: Tensor  # [L] int64, ascending
    spans: tuple[ChunkSpan, ...]  # row_starts and context_lens on the host
    tp_sizes: tuple[int, ...]  # number of rows of each tp rank between layers; the sum is T
    tokens_per_rank: tuple[int, ...]  # number of rows that each ep rank dispatches, including those of other replicas
    padding: Tensor | None = None  # [T] bool: rows without a token; None: there are none
    own_rows: slice = field(default_factory=lambda: slice(None))  # this rank's rows between layers
    halves: tuple[StepInputs, ...] = ()  # the two halves of an overlapped step; empty: the step runs as a whole
    rows_before: int = 0  # for a half: number of rows of all ranks in the half before it
    most_per_rank: tuple[int, ...] = ()  # for a half: number of rows that each rank dispatches in the larger half
    # The next two describe the rows whose logits are computed: all rows of a padded step, otherwise `logits_rows`.
    slots: Tensor | None = None  # [R] int64: slot of the row's request; for padding, the slot behind the last
    settings: Tensor | None = None  # [R, W] int64: SAMPLING_SETTINGS of the row's request; all zeros for padding
    states: StateRows | None = None  # None: no layer keeps a state for each request
    forced_routes: Tensor | None = None  # [layers of the rank's stage, T, K] int64: experts to use; -1: the router's
    # Slots and block tables of the cache groups after the first, to which `cache_slots` and `block_table` belong.
    other_tables: tuple[GroupTable, ...] = ()

    def of_group(self, group: int) -> StepInputs:
        """Return the step with slots and block table of a cache group."""
        return self._of_others[group - 1] if group else self

    @functools.cached_property
    def _of_others(self) -> tuple[StepInputs, ...]:
        return tuple(dataclasses.replace(self, **table._asdict()) for table in self.other_tables)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that layers read and that differ between steps with the same shapes. Graphs copy them.

        Positions are left out, because layers read the rotations made of them.
        """
        of_others = itertools.chain.from_iterable(self.other_tables)
        own = self.token_ids, self.cache_slots, self.context_lens, self.block_table
        return *own, *of_others, *(self.states or ())

    def with_tensors(self, tensors: Iterable[Tensor]) -> StepInputs:
        """Return the step with other tensors, in the order of `tensors`."""
        token_ids, cache_slots, context_lens, block_table, *others = tensors
        return dataclasses.replace(
            self,
            token_ids=token_ids,
            cache_slots=cache_slots,
            context_lens=context_lens,
            block_table=block_table,
            other_tables=tuple(GroupTable(others.pop(0), others.pop(0)) for _ in self.other_tables),
            states=StateRows(*others) if self.states else None,
        )

    def copy_tensors(self, other: StepInputs) -> None:
        """Copy the tensors of another step into this one.

        The other step's block tables may have fewer rows and columns.
        """
        for own, tensor in zip(self.tensors(), other.tensors(), strict=True):
            if own.shape != tensor.shape:
                own = own[: tensor.shape[0], : tensor.shape[1]]
            own.copy_(tensor)

    def write_nothing(self) -> None:
        """Remove the slots and rows of caches to which the step would write."""
        for slots, _ in ((self.cache_slots, self.block_table), *self.other_tables):
            slots.fill_(-1)
        for rows, none in zip(self.states or (), StateRows.none(1), strict=False):
            rows.copy_(none)

    @functools.cached_property
    def max_rows_per_chunk(self) -> int:
        return max((span.num_rows for span in self.spans), default=0)

    @functools.cached_property
    def min_rows_per_chunk(self) -> int:
        return min((span.num_rows for span in self.spans), default=0)

    @functools.cached_property
    def rows_have_positions(self) -> bool:
        """True if every row is in a chunk, and no chunk has more rows than positions. Padding rows are in no chunk."""
        are_in_chunks = sum(span.num_rows for span in self.spans) == len(self.token_ids)
        return are_in_chunks and all(span.num_rows <= span.context_len for span in self.spans)

    def rows_for_logits(self, hidden_TD: Tensor) -> Tensor:
        """Return the hidden states [L, D] of the rows whose logits are computed."""
        return hidden_TD if len(self.logits_rows) == len(hidden_TD) else hidden_TD.index_select(0, self.logits_rows)


def decode_step(num_tokens: int) -> StepInputs:
    """Return a step of one rank in which each request has one token, with arbitrary contents."""
    zeros_T = torch.zeros(num_tokens, dtype=torch.int64)
    return StepInputs(
        token_ids=zeros_T,
        positions=zeros_T,
        cache_slots=zeros_T,
        row_starts=torch.arange(num_tokens + 1, dtype=torch.int32),
        context_lens=torch.ones(num_tokens, dtype=torch.int32),
        block_table=torch.zeros(num_tokens, 1, dtype=torch.int32),
        logits_rows=zeros_T,
        spans=tuple(ChunkSpan(row, 1, 1) for row in range(num_tokens)),
        tp_sizes=(num_tokens,),
        tokens_per_rank=(num_tokens,),
    )
