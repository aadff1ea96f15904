"""Log-probabilities of a prompt, packed and unpacked by hand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from moeserve.protocol import LogprobRows, TokenLogprobs


def packed(rows: Sequence[TokenLogprobs]) -> list[LogprobRows]:
    """Return rows of equal length as the engine sends them: one table, or none for no rows."""
    if not rows:
        return []
    token_ids = array("i", [token_id for row in rows for token_id in row.token_ids])
    logprobs = array("f", [logprob for row in rows for logprob in row.logprobs])
    ranks = array("i", [rank for row in rows for rank in row.ranks])
    return [LogprobRows(len(rows), token_ids.tobytes(), logprobs.tobytes(), ranks.tobytes())]


def unpacked(tables: Sequence[LogprobRows]) -> list[TokenLogprobs]:
    """Return all rows of some tables."""
    return [table.row(index) for table in tables for index in range(table.num_rows)]
