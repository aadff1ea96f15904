"""The debug check that the request table of every rank equals the scheduler's state (`debug_rank_state`).

After each step, a rank reports digests of its state of the plan's requests. The scheduler compares the reports when it
commits the plan, because only then it knows the tokens that the step has sampled.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moeserve.errors import RankStateError
from moeserve.protocol import RankReport, RequestDigest


@dataclass(frozen=True)
class ExpectedState:
    """The state of a request that all ranks must have after a step."""

    request_id: str
    slot: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]


def request_digest(token_ids: Sequence[int], block_ids: Iterable[int]) -> RequestDigest:
    """Return a rank's digest of a request: the numbers of its tokens and blocks, and a checksum of both."""
    tokens, blocks = array("q", token_ids), array("q", block_ids)
    return len(tokens), len(blocks), zlib.crc32(blocks.tobytes(), zlib.crc32(tokens.tobytes()))


def check_reports(step: int, expected: Sequence[ExpectedState | None], reports: Sequence[RankReport]) -> None:
    """Compare the reports of all ranks with the expected states.

    Args:
        expected: expected state for each chunk of the plan; None: the request ended before the result arrived, or has
            failed.

    Raises:
        RankStateError: a rank has another state than expected.
    """
    digests = [None if each is None else request_digest(each.token_ids, each.block_ids) for each in expected]
    for report in reports:
        assert len(report.digests) == len(expected), f"rank {report.rank}: a report of another step than {step}"
        for state, own, theirs in zip(expected, digests, report.digests, strict=True):
            if state is not None and own is not None and theirs != own:
                raise RankStateError(
                    f"rank {report.rank}: slot {state.slot} (request {state.request_id!r}) has {_shown(theirs)} after "
                    f"step {step}, but the scheduler has {_shown(own)}; please report this as a fault of moeserve"
                )


def _shown(digest: RequestDigest) -> str:
    return "{} tokens and {} blocks with checksum {:08x}".format(*digest)
