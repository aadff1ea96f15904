"""Blocks are loaded while that is faster than computing them, by what was measured."""

from __future__ import annotations

from moeserve.kv.load_rates import TRIES, LoadRates


def loads(rates: LoadRates, times: int) -> int:
    return sum(rates.pays() for _ in range(times))


def test_blocks_are_loaded_until_both_rates_are_known() -> None:
    rates = LoadRates()
    assert rates.pays()
    rates.note_load(64, 40.0)
    assert rates.pays()
    rates.note_step(31, 0.001)  # too few tokens to tell
    assert rates.pays()
    rates.note_step(32, 32.0)  # 16 s for a block, which is loaded in 10 s
    assert loads(rates, 100) == 100


def test_slow_loads_are_tried_now_and_then() -> None:
    rates = LoadRates()
    rates.note_step(1600, 1.0)  # 10 ms for a block
    rates.note_load(160, 1.0)  # 100 ms for a block
    assert loads(rates, 10 * TRIES) == 10
    for _ in range(20):  # the disk was busy, and is not any more
        rates.note_load(160, 0.01)
    assert loads(rates, 100) == 100


def test_a_single_slow_load_does_not_count_for_long() -> None:
    rates = LoadRates()
    rates.note_step(1600, 1.0)
    for _ in range(10):
        rates.note_load(160, 0.01)  # 1 ms for a block
    rates.note_load(160, 0.2)  # 20 ms
    assert rates.pays()
