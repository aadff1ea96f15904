"""Makes the request table of one rank wrong, in the ranks of an engine: tests/sitecustomize.py calls `plant`."""

from __future__ import annotations

from typing import Any


def plant(name: str, which: str) -> None:
    """Change a state in slot 1 after the fifth step.

    Args:
        name: of this rank.
        which: "3 token" or "3 block", with the number of the rank.
    """
    rank, what = which.split()
    if name.split()[1] != rank:
        return
    from moeserve.worker.request_table import RequestTable

    append_tokens, num_steps = RequestTable.append_tokens, 0

    def append_wrong_tokens(self: RequestTable, chunks: Any, token_ids: list[int]) -> None:
        nonlocal num_steps
        append_tokens(self, chunks, token_ids)
        num_steps += 1
        if num_steps == 5:
            if what == "token":
                next(chunk for chunk in chunks if chunk.slot == 1).request.token_ids[0] += 1
            else:
                self.tables[0, 1, 0] += 1

    RequestTable.append_tokens = append_wrong_tokens  # type: ignore[method-assign]
