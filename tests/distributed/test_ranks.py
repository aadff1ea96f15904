"""The helper that runs functions on ranks."""

from __future__ import annotations

from ranks import Place, Ranks


def fail_on(place: Place, rank: int) -> int:
    if place.rank == rank:
        raise ValueError(f"rank {rank} was told to fail")
    return place.rank


def test_an_error_is_the_ranks_own_traceback(ranks: Ranks) -> None:
    """Else a test that fails on its ranks would pass."""
    outcomes = ranks.start(2, "test_ranks:fail_on", rank=1).outcomes()
    assert (outcomes[0].value, outcomes[0].error) == (0, None)
    assert "in fail_on" in str(outcomes[1].error)
    assert "ValueError: rank 1 was told to fail" in str(outcomes[1].error)
