"""Chunks for tests that run a model without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.sampling_params import RequestParams
from moeserve.worker.request_table import Chunk, ChunkStates, RequestState, RequestTable


def make_chunk(
    table: RequestTable,
    slot: int,
    token_ids: Sequence[int],
    start: int,
    block_ids: Sequence[int],
    *,
    params: RequestParams | None = None,
) -> Chunk:
    """Return a chunk whose request has these blocks in the table. With params it samples the next token."""
    request = RequestState(
        token_ids=[0] * start + list(token_ids),
        num_prompt_tokens=start + len(token_ids),
        num_blocks=0,
        params=params or RequestParams(),
        seed=0,
        end_token_ids=[],
    )
    table.add(slot, request, [block_ids] * len(table.tables))
    return Chunk(
        slot,
        start,
        list(token_ids),
        request,
        samples=params is not None,
        prompt_targets=[],
        states=ChunkStates(load=slot if start else -1, store=slot),
    )
