"""One step as tensors: built by the worker from a plan, read by every layer. Knows no request and no policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class ChunkSpan:
    """Where one chunk's rows lie among the step's tokens. On the host, for loops and shapes."""

    first_row: int
    num_rows: int
    context_len: int  # positions that its last row attends to: those computed before, and this chunk's


@dataclass(frozen=True)
class StepInputs:
    """The tokens of one step, chunk after chunk. T tokens in S chunks, of which some are sampled."""

    token_ids: Tensor  # [T] int64, device
    positions: Tensor  # [T] int64, device: position of each token in its request
    cache_slots: Tensor  # [T] int64, device: block_id * block_size + offset, where its key and value are kept
    row_starts: Tensor  # [S + 1] int32, device: rows of chunk s are row_starts[s] to row_starts[s + 1] - 1
    context_lens: Tensor  # [S] int32, device
    block_table: Tensor  # [S, max_blocks] int32, device: block ids of each chunk's context; 0 beyond it
    logits_rows: Tensor  # [L] int64, device: rows whose logits are wanted, ascending
    spans: tuple[ChunkSpan, ...]  # the same as row_starts and context_lens, on the host
    tp_sizes: tuple[int, ...]  # how many of the T rows each tp rank has between layers, in order of rank
    tokens_per_rank: tuple[int, ...]  # rows that each ep rank brings to dispatch, those of other replicas included
    padding: Tensor | None = None  # [T] bool, device: rows that stand for no token; None: there are none
    own_rows: slice = field(default_factory=lambda: slice(None))  # of the T: this rank's between layers

    @property
    def max_rows_per_chunk(self) -> int:
        return max((span.num_rows for span in self.spans), default=0)

    def wanted_rows(self, hidden_TD: Tensor) -> Tensor:
        """[L, D]: those of `logits_rows`."""
        return hidden_TD if len(self.logits_rows) == len(hidden_TD) else hidden_TD[self.logits_rows]
