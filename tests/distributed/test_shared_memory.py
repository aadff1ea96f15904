"""Collectives in shared memory: the bytes of gloo for all sizes, overlapping collectives, waits, and clean ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import signal
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from collective_checks import same_bytes
from joining import join, patient_reports, store_of
from rank_processes import shared_memory_of
from ranks import Place, Ranks
from test_handshake import listening_names
from torch import Tensor
from torch.distributed import Store

from moeserve.distributed import handshake, shared_memory
from moeserve.distributed.coordinator import GroupCoordinator, PendingTensor
from moeserve.distributed.transport import sum_in_tree
from moeserve.errors import DistributedError
from moeserve.ops.native import native_kernels

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int8", "uint8", "bool")
OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all", "broadcast")
USUAL_SLOTS = dict(NUM_SLOTS=shared_memory.NUM_SLOTS, SLOT_BYTES=shared_memory.SLOT_BYTES)
SMALL_SLOTS = dict(NUM_SLOTS=2, SLOT_BYTES=512)  # nearly all data is longer than all slots together


# ---- bytes


@pytest.mark.slow_but("2-300", "3-150")
@pytest.mark.parametrize(
    ("num_ranks", "num_calls", "largest", "slots"),
    [
        (2, 300, 3000, USUAL_SLOTS),
        (8, 20, 1000, USUAL_SLOTS),
        (3, 150, 300, SMALL_SLOTS),
    ],
)
def test_bytes_are_those_of_gloo(
    ranks: Ranks, num_ranks: int, num_calls: int, largest: int, slots: dict[str, int]
) -> None:
    arguments: dict[str, Any] = dict(seed=num_ranks, num_calls=num_calls, largest=largest, slots=slots)
    ranks.run(num_ranks, "test_shared_memory:compare_with_gloo", within_s=120, **arguments)


def compare_with_gloo(place: Place, seed: int, num_calls: int, largest: int, slots: dict[str, int]) -> None:
    """Compare random collectives over both transports, with sums by each instruction set, or by torch."""
    kernels = native_kernels()
    isas = kernels.usable_isas() if kernels else []
    with mock.patch.multiple(shared_memory, **slots):
        shared = join(place, scope="shared").ep
    gloo = join(place, scope="gloo", transport="gloo").ep
    assert (shared.supports_cpu_graphs, gloo.supports_cpu_graphs) == (True, False)
    dice = random.Random(seed)  # the same on all ranks
    num_ranks, rank = place.num_ranks, place.rank
    for call in range(num_calls):
        if kernels:
            kernels.set_isa(isas[(call // len(OPERATIONS)) % len(isas)])
        operation, dtype = OPERATIONS[call % len(OPERATIONS)], dice.choice(DTYPES)
        row = dice.choice([[], [3], [2, 5], [64], [1]])
        bound = int(largest ** dice.random())
        table = [
            [dice.choice([0, 1, bound, dice.randrange(bound + 1)]) for _ in range(num_ranks)] for _ in range(num_ranks)
        ]
        source = dice.randrange(num_ranks)
        num_rows = {"all_gather": table[0][rank], "reduce_scatter": sum(table[0]), "all_to_all": sum(table[rank])}
        x = random_values([num_rows.get(operation, bound), *row], dtype, (seed, call, rank))
        results = [collective(group, operation, x, table, source) for group in (shared, gloo)]
        assert same_bytes(*results), f"call {call}: {operation} of {dtype}, rows {row}, sizes {table}, bound {bound}"
    if kernels:
        kernels.set_isa(isas[0])


def collective(group: GroupCoordinator, operation: str, x: Tensor, table: list[list[int]], source: int) -> Tensor:
    match operation:
        case "broadcast":
            return group.broadcast(x, source)
        case "all_gather":
            return group.all_gather(x, table[0])
        case "reduce_scatter":
            is_rounded = x.dtype == torch.float32 and len(x) % 2
            return group.reduce_scatter(x, table[0], torch.bfloat16 if is_rounded else None)
        case _:
            receive_sizes = [row[group.rank_in_group] for row in table]
            return group.all_to_all(x, table[group.rank_in_group], receive_sizes).wait()


def random_values(shape: list[int], dtype: str, seed: object) -> Tensor:
    """Return values of any magnitude, with infinities and both zeros. Without NaN, which has many bit patterns."""
    generator = torch.Generator().manual_seed(random.Random(str(seed)).getrandbits(60))
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    torch_dtype = getattr(torch, dtype)
    if not torch_dtype.is_floating_point:
        limits = torch.iinfo(torch_dtype)
        return torch.randint(limits.min // 2, limits.max // 2, shape, generator=generator, dtype=torch_dtype)
    scales = 10.0 ** torch.randint(-9, 5, shape, generator=generator)
    values = (torch.randn(shape, generator=generator) * scales).to(torch_dtype)
    values[torch.rand(shape, generator=generator) < 0.01] = -0.0
    if random.Random(f"{seed} infinite").random() < 0.1:
        values[torch.rand(shape, generator=generator) < 0.001] = torch.inf
    return values


@pytest.mark.parametrize(("num_ranks", "num_calls", "slots"), [(2, 400, SMALL_SLOTS), (4, 200, USUAL_SLOTS)])
def test_overlapping_collectives_of_slow_ranks(
    ranks: Ranks, num_ranks: int, num_calls: int, slots: dict[str, int]
) -> None:
    arguments: dict[str, Any] = dict(seed=num_ranks, num_calls=num_calls, slots=slots, delay_s=0.02)
    num_checked = ranks.run(num_ranks, "test_shared_memory:overlap", within_s=120, **arguments)
    assert len(set(num_checked)) == 1
    assert num_checked[0] > num_calls / 2


def overlap(place: Place, seed: int, num_calls: int, slots: dict[str, int], delay_s: float) -> int:
    """Keep up to four collectives under way, and wait for them in any order, on ranks that sleep now and then.

    They belong to three groups that share a connection. Every byte is known in advance.
    """
    with mock.patch.multiple(shared_memory, **slots):
        groups = join(place)
    dice, own_dice = random.Random(seed), random.Random(f"{seed} {place.rank}")
    num_ranks, rank = place.num_ranks, place.rank
    under_way: list[tuple[int, PendingTensor, Tensor]] = []
    num_checked = 0
    for call in range(num_calls):
        if own_dice.random() < 0.1:
            time.sleep(own_dice.random() * delay_s)
        group = dice.choice([groups.world, groups.dp, groups.ep])
        bound = int(20000 ** dice.random())
        table = [[dice.choice([0, dice.randrange(bound + 1)]) for _ in range(num_ranks)] for _ in range(num_ranks)]
        given = [random_values([sum(table[other])], "float32", (seed, call, other)) for other in range(num_ranks)]
        match dice.randrange(4):
            case 0:
                sizes = [sum(row) for row in table]
                under_way.append((call, group.begin_all_gather(given[rank], sizes), torch.cat(given)))
            case 1:
                sizes = table[0]
                x = [random_values([sum(sizes)], "bfloat16", (seed, call, other)) for other in range(num_ranks)]
                expected = sum_in_tree(torch.stack(x)).split(sizes)[rank]
                assert same_bytes(group.reduce_scatter(x[rank], sizes), expected), f"sum {call}"
            case _:
                receive_sizes = [table[other][rank] for other in range(num_ranks)]
                expected = torch.cat([given[other].split(table[other])[rank] for other in range(num_ranks)])
                under_way.append((call, group.all_to_all(given[rank], table[rank], receive_sizes), expected))
        num_left = dice.randrange(5) if call < num_calls - 1 else 0
        while len(under_way) > num_left:
            number, pending, expected = under_way.pop(dice.randrange(len(under_way)))
            assert same_bytes(pending.wait(), expected), f"call {number} of rank {rank}"
            num_checked += 1
    return num_checked


def test_a_collective_without_a_wait_keeps_its_memory(ranks: Ranks) -> None:
    assert ranks.run(3, "test_shared_memory:begin_without_waiting") == [[0, 1, 2]] * 3


def begin_without_waiting(place: Place) -> list[int]:
    group = join(place).world
    for _ in range(20):
        group.begin_all_gather(torch.full((100_000,), place.rank), [100_000] * place.num_ranks)
        torch.full((200_000,), 7)  # would take memory that was freed too early
    return group.all_gather(torch.tensor([place.rank]), [1] * place.num_ranks).tolist()


# ---- waits


def test_a_waiting_rank_sleeps(ranks: Ranks) -> None:
    _, (used, waited, sleeps) = ranks.run(2, "test_shared_memory:wait_for_a_late_rank", seconds=1.5)
    assert waited > 1.4
    assert used / waited < 0.1  # a rank that spins has a third of a core or more, even on a busy machine
    assert (
        sleeps < waited / 0.01
    )  # the time between checks of the connections; a rank that naps sleeps 500 times a second


def wait_for_a_late_rank(place: Place, seconds: float) -> list[float]:
    """Return of a wait: the CPU seconds, the seconds, how often the process went to sleep."""
    group, store = join(place).world, store_of(place)
    group.barrier()
    if place.rank == 0:
        store.wait(["waits"])
        time.sleep(seconds)
        group.barrier()
        return []
    used, began, slept = time.process_time(), time.monotonic(), sleeps_of_this_process()
    store.set("waits", "")
    group.barrier()
    return [time.process_time() - used, time.monotonic() - began, sleeps_of_this_process() - slept]


def sleeps_of_this_process() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def test_a_sleeping_rank_is_woken(ranks: Ranks) -> None:
    """Data wakes it, not its next check of the connections. Another program may delay it, so it may try three times."""
    tries = (ranks.run(3, "test_shared_memory:wake_sleeping_ranks", num_calls=15) for _ in range(3))
    assert any(extra_seconds(seconds) < 0.005 for seconds in tries)


def extra_seconds(by_rank: list[list[list[float]]]) -> float:
    """Return by how much the usual wake-up through shared memory takes longer than the one through gloo's sockets."""
    shared, gloo = (statistics.median(itertools.chain(*seconds)) for seconds in zip(*by_rank, strict=True))
    return shared - gloo


def wake_sleeping_ranks(place: Place, num_calls: int) -> list[list[float]]:
    """Return the seconds from the last rank's call to the end of each collective on the ranks that called earlier.

    On a busy machine all wake-ups take longer, so collectives in shared memory alternate with those of gloo.
    """
    groups = [join(place, scope=name, transport=name).world for name in ("auto", "gloo")]
    dice = random.Random(7)
    seconds: list[list[float]] = [[], []]
    for _ in range(num_calls):
        for group, of_group in zip(groups, seconds, strict=True):
            delays = [dice.random() * 0.1 for _ in range(place.num_ranks)]
            group.barrier()
            time.sleep(delays[place.rank])
            called = group.all_gather(torch.tensor([time.time()], dtype=torch.float64), [1] * place.num_ranks)
            if int(called.argmax()) != place.rank:
                of_group.append(time.time() - float(called.max()))
    return seconds


def test_ctrl_c_ends_a_wait(ranks: Ranks) -> None:
    assert ranks.run(2, "test_shared_memory:interrupt_a_wait") == [[0, 1]] * 2


def interrupt_a_wait(place: Place) -> list[int]:
    """Interrupt the wait on rank 1. The collective completes all the same, after the interrupt has ended the wait."""
    group, store = join(place).world, store_of(place)
    group.barrier()
    if place.rank == 0:
        store.wait(["interrupted"])
    pending = group.begin_all_gather(torch.tensor([place.rank]), [1, 1])
    if place.rank == 1:

        def wait_for_interrupt() -> None:
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            pending.wait()

        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                wait_for_interrupt()
        finally:
            signal.signal(signal.SIGINT, handler)
        store.set("interrupted", "")
    return pending.wait().tolist()


def test_a_rank_with_all_its_data_blocks_nobody(ranks: Ranks) -> None:
    ranks.run(3, "test_shared_memory:send_past_an_absent_rank", num_bytes=20 * 2**20)


def send_past_an_absent_rank(place: Place, num_bytes: int) -> None:
    """Exchange more than fits into the slots between ranks 0 and 1. Rank 2 has its bytes, and waits for their end."""
    group, store = join(place).world, store_of(place)
    group.barrier()
    sizes = {0: [0, num_bytes, 1], 1: [num_bytes, 0, 1], 2: [1, 1, 0]}
    x = torch.zeros(sum(sizes[place.rank]), dtype=torch.uint8)
    group.all_to_all(x, sizes[place.rank], [sizes[other][place.rank] for other in range(3)]).wait()
    if place.rank == 2:
        store.wait(["end/0", "end/1"])
    store.set(f"end/{place.rank}", "")
    group.barrier()


# ---- failures


@pytest.mark.parametrize(("first", "second"), [("gather 2", "gather 3"), ("sum", "gather 3"), ("nothing", "gather 3")])
def test_different_collectives_fail(ranks: Ranks, first: str, second: str) -> None:
    """Also without the check of the order."""
    messages = ranks.run(2, "test_shared_memory:call_different", operations=[first, second])
    assert any("debug_collectives" in message for message in messages)
    assert all("failed: rank" in message for message in messages), messages


def call_different(place: Place, operations: list[str]) -> str:
    group, store = join(place).world, store_of(place)
    x = torch.ones(8)
    try:
        for operation in operations[place.rank], "sum":
            match operation:
                case "gather 3":
                    group.all_gather(x[:3], [3, 3])
                case "gather 2":
                    group.all_gather(x[:2], [2, 2])
                case "sum":
                    group.reduce_scatter(x, [4, 4])
                case "nothing":
                    group.all_to_all(x[:0], [0, 0], [0, 0]).wait()
    except DistributedError as error:
        stay_until_all_have_failed(place, store)
        return str(error)
    return ""


def stay_until_all_have_failed(place: Place, store: Store) -> None:
    """Stay connected, so that others notice the failure itself."""
    store.set(f"failed/{place.rank}", "")
    store.wait([f"failed/{rank}" for rank in range(place.num_ranks)], timedelta(seconds=50))


def test_a_rank_that_failed_is_not_waited_for(ranks: Ranks) -> None:
    first, second, third = ranks.run(3, "test_shared_memory:fail_and_stay")
    assert "within 2 s, no data from rank 2" in first
    assert "collective 4) failed: rank 0 closed its connection" in second
    assert "failed: rank 0 closed its connection" in third


def fail_and_stay(place: Place) -> str:
    """Let rank 2 be late. Rank 0 has failed by then, but stays connected."""
    group, store = join(place, timeout_s=[2.0, 50.0, 50.0][place.rank]).world, store_of(place)
    group.barrier()
    if place.rank == 2:
        store.wait(["failed/0"])
    message = ""
    try:
        for _ in range(2):
            group.all_to_all(torch.ones(2), [1, 1, 0], [[1, 1, 1], [1, 1, 1], [0, 0, 0]][place.rank]).wait()
    except DistributedError as error:
        message = str(error)
    stay_until_all_have_failed(place, store)
    return message


def test_a_killed_rank_is_named_at_once_and_nothing_is_left(tmp_path: Path) -> None:
    seed, dice = 0, random.Random(0)
    victim = dice.randrange(4)
    own = Ranks()  # without groups of earlier tests
    try:
        run = own.start(4, "test_shared_memory:exchange_until_it_fails", seed=seed, folder=str(tmp_path))
        wait_until(lambda: len(os.listdir(tmp_path)) == 4)
        time.sleep(dice.random() * 0.5)
        run.processes[victim].kill()
        outcomes = run.outcomes()
        for rank in {0, 1, 2, 3} - {victim}:
            assert outcomes[rank].error is None, outcomes[rank].error
            message, used, left = outcomes[rank].value
            assert f"No failure report from rank {victim}:" in message, message
            assert used == [4, 0]  # memories of four ranks, once for all groups: mapped, and their files closed
            assert left == [0, 0]
        assert shared_memory_of(process.pid for process in run.processes) == []
    finally:
        own.close()


@pytest.mark.slow
def test_ranks_killed_at_any_moment_leave_nothing(tmp_path: Path) -> None:
    """Also while they listen in the handshake: kill them at several moments after the first rank has a memory."""
    names: set[bytes] = set()
    for moment in (None, 0.0, 0.004, 0.05):
        own = Ranks()
        try:
            function = "listen_for_ever" if moment is None else "exchange_until_it_fails"
            run = own.start(2, f"test_shared_memory:{function}", seed=0, folder=str(tmp_path))
            pids = [process.pid for process in run.processes]
            wait_until(lambda pids=pids: any(sum(memories_of(pid)) for pid in pids))  # type: ignore[misc]
            if moment is None:
                wait_until(lambda pids=pids: listening_names(pids))  # type: ignore[misc]
            time.sleep(moment or 0.0)
            names |= listening_names(pids)
            for process in run.processes:
                process.kill()
            assert all(outcome.error for outcome in run.outcomes())
            assert shared_memory_of(pids) == []
        finally:
            own.close()
    assert names
    assert not names & listening_names()


def listen_for_ever(place: Place, seed: int, folder: str) -> None:
    """Stay in the handshake."""
    with mock.patch.object(handshake._Handshake, "connect_all", side_effect=lambda: time.sleep(600)):
        join(place)


def exchange_until_it_fails(place: Place, seed: int, folder: str) -> list[Any]:
    """Return the error, and the memories of this process before and after leaving. No time limit ends the exchange."""
    groups = join(place, timeout_s=600.0)
    group = groups.ep
    (Path(folder) / f"{place.rank}").touch()  # it has begun
    own_dice = random.Random(f"{seed} {place.rank}")
    x = torch.ones(4000 * place.num_ranks)

    def exchange() -> None:
        while True:
            if own_dice.random() < 0.05:
                time.sleep(0.01 * own_dice.random())
            group.reduce_scatter(x[: place.num_ranks], [1] * place.num_ranks)
            group.all_to_all(x, [4000] * place.num_ranks, [4000] * place.num_ranks).wait()
            group.reduce_scatter(x, [4000] * place.num_ranks)

    with patient_reports(), pytest.raises(DistributedError) as failure:
        exchange()
    used = memories_of(os.getpid())
    groups.leave("the test is over")
    return [str(failure.value), used, memories_of(os.getpid())]


def memories_of(pid: int) -> list[int]:
    """Return the number of shared memories that a process has mapped, and the number of their open files."""
    num_open = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            num_open += "memfd:moeserve" in os.readlink(link)
    return [Path(f"/proc/{pid}/maps").read_text().count("memfd:moeserve"), num_open]


def wait_until(condition: Callable[[], object], within_s: float = 200.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)
