"""Recorded calls of kernels: what they do when they are made again, and what is refused."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch
from paged_steps import kernels, needs_kernels, same_bytes

pytestmark = needs_kernels


def test_calls_are_made_again_on_what_is_there_by_then() -> None:
    a, b, total, normed = (torch.randn(3, 8) for _ in range(4))
    weight = torch.randn(8)
    tape = kernels.Tape()
    tape.start()
    kernels.add(a, b, total)
    kernels.rms_norm(total, weight, 1e-5, normed)
    tape.stop()
    kernels.add(a, a, torch.empty_like(a))
    assert tape.num_calls == 2

    first = normed.clone()
    a.copy_(torch.randn(3, 8))
    tape.play()
    assert same_bytes(total, a + b)
    expected = torch.empty_like(total)
    kernels.rms_norm(total, weight, 1e-5, expected)
    assert same_bytes(normed, expected)
    assert not same_bytes(normed, first)


def test_memory_stays_as_long_as_the_tape() -> None:
    out, tape = torch.empty(2, 4), kernels.Tape()
    tape.start()
    kernels.add(torch.full((2, 4), 1.5), torch.full((2, 4), 2.0), out)
    tape.stop()
    gc.collect()
    others = [torch.zeros(2, 4) for _ in range(1000)]  # which would lie where the numbers were
    out.zero_()
    tape.play()
    assert out.eq(3.5).all()
    del others


def test_tensors_in_a_range_of_addresses_are_not_kept() -> None:
    memory = torch.zeros(100)
    inside, outside = memory[10:14].view(1, 4), torch.ones(1, 4)
    before = sys.getrefcount(inside), sys.getrefcount(outside)
    tape = kernels.Tape(memory.data_ptr(), memory.nbytes)
    tape.start()
    kernels.add(inside, outside, inside)
    tape.stop()
    assert sys.getrefcount(inside) == before[0]
    assert sys.getrefcount(outside) > before[1]
    past_its_end = kernels.Tape(memory.data_ptr(), inside.storage_offset() * 4)
    past_its_end.start()
    kernels.add(outside, outside, inside)
    past_its_end.stop()
    assert sys.getrefcount(inside) > before[0]


def test_a_call_that_failed_is_not_recorded() -> None:
    tape = kernels.Tape()
    tape.start()
    with pytest.raises(ValueError, match="b has shape"):
        kernels.add(torch.empty(2, 4), torch.empty(2, 5), torch.empty(2, 4))
    tape.stop()
    assert tape.num_calls == 0


def test_what_a_call_returned_it_must_return_again() -> None:
    keys, order, counts = torch.tensor([1, 0, 1]), torch.empty(3, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
    tape = kernels.Tape()
    tape.start()
    assert kernels.sort_pairs(keys, 0, 3, order, counts) == 3
    tape.stop()
    keys[0] = 0
    tape.play()
    assert counts.tolist() == [2, 1]
    keys[0] = -1
    with pytest.raises(RuntimeError, match="something else"):
        tape.play()


def test_one_thread_records_one_tape_and_no_other_thread_does() -> None:
    first, second = kernels.Tape(), kernels.Tape()
    a = torch.ones(1, 4)

    def add() -> None:
        kernels.add(a, a, torch.empty_like(a))

    first.start()
    with pytest.raises(RuntimeError, match="recording a tape already"):
        second.start()
    with pytest.raises(RuntimeError, match="is recording"):
        second.play()
    other = threading.Thread(target=add)
    other.start()
    other.join()
    assert first.num_calls == 0
    add()
    second.stop()  # not the one that records
    add()
    first.stop()
    assert (first.num_calls, second.num_calls) == (2, 0)


def test_a_tape_that_is_gone_records_no_more() -> None:
    tape = kernels.Tape()
    tape.start()
    del tape
    gc.collect()
    again = kernels.Tape()
    again.start()
    again.stop()
