"""The store of experts on disk: what it reads, what it keeps in memory, and what it does about errors."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from paged_steps import NATIVE
from torch import Tensor

from moeserve.models.expert_store.served import LEAST_FREE_BYTES, SECONDS_BETWEEN_LOOKS, ServedStore
from moeserve.ops.native import set_num_threads
from moeserve.ops.products.cpu import CpuExpertStore, CpuGroupedProduct, CpuStoredExperts
from moeserve.ops.products.interface import Gather, OpenWeights, PackedWeights, RowGroups
from moeserve.ops.rows.activations import SwiGLU

NUM_EXPERTS, HIDDEN, WIDTH = 7, 96, 70
PLACE = 1000  # of the first expert in the file


def packed(num_outputs: int, num_inputs: int, packed_format: str, *, is_gated: bool) -> PackedWeights:
    packing = NATIVE.packing
    assert packing is not None
    weight_eOI = torch.randn(NUM_EXPERTS, num_outputs, num_inputs).bfloat16()
    weights = OpenWeights(weight_eOI, torch.randn(NUM_EXPERTS, num_outputs).bfloat16(), SwiGLU() if is_gated else None)
    return packing.pack(weights, packed_format, in_place=False)


class StoredLayer:
    """Products of one layer's experts in memory, and a store with a copy of them in a file."""

    def __init__(self, folder: Path, num_slots: int, packed_format: str = "bfloat16") -> None:
        gate_up = packed(2 * WIDTH, HIDDEN, packed_format, is_gated=True)
        down = packed(HIDDEN, WIDTH, packed_format, is_gated=False)
        self.gate_up, self.down = (CpuGroupedProduct(NATIVE.native, weights) for weights in (gate_up, down))
        self.path, self.parts, place = folder / "experts", [], PLACE
        content = bytes(PLACE)
        for weights in (gate_up, down):
            size, sums = weights.panels.shape[1], NATIVE.native.checksums(weights.panels)
            self.parts.append([(place + index * size, size, checksum) for index, checksum in enumerate(sums)])
            content += weights.panels.numpy().tobytes()
            place += weights.panels.nbytes
        self.path.write_bytes(content)
        self.num_slots = num_slots
        self.store, self.experts = self.opened(self.path)

    def opened(self, path: Path) -> tuple[CpuExpertStore, CpuStoredExperts]:
        store = CpuExpertStore(NATIVE.native, str(path))
        return store, store.add_layer(self.gate_up, self.down, self.parts, self.num_slots)

    def expected(self, rows_RD: Tensor, groups: RowGroups, gather: Gather | None = None) -> Tensor:
        return self.down.multiply(self.gate_up.multiply(rows_RD, groups, gather), groups)

    def visit(self, *experts: int) -> None:
        """Multiply one row with each of the experts."""
        counts_e = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
        counts_e[list(experts)] = 1
        rows_RD, groups = torch.randn(len(experts), HIDDEN).bfloat16(), RowGroups(counts_e)
        assert torch.equal(self.experts.multiply(rows_RD, groups, None, None), self.expected(rows_RD, groups))

    @property
    def counts(self) -> tuple[int, int]:
        """Experts found in memory, and read."""
        ((found, read, _, _, _),) = self.store.counters()
        return found, read


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("num_slots", [1, 3, NUM_EXPERTS])
@pytest.mark.parametrize("packed_format", ["bfloat16", "int8", "q4_k"])
def test_products_have_the_bytes_of_those_in_memory(
    isa: str, packed_format: str, num_slots: int, tmp_path: Path
) -> None:
    layer = StoredLayer(tmp_path, num_slots, packed_format)
    counts = [(3, 0, 1, 0, 5, 2, 1), (0,) * NUM_EXPERTS, (1,) * NUM_EXPERTS, (0, 0, 40, 0, 0, 0, 0)]
    for num_threads, counts_e in itertools.product((1, 3), counts):
        set_num_threads(num_threads)
        groups = RowGroups(torch.tensor(counts_e))
        source_ND = torch.randn(9, HIDDEN).bfloat16()
        gather = Gather(torch.randint(9 * 2, (sum(counts_e),)), 2)
        assert torch.equal(
            layer.experts.multiply(source_ND, groups, gather, None), layer.expected(source_ND, groups, gather)
        )
        rows_RD = torch.randn(sum(counts_e) + 2, HIDDEN).bfloat16()
        groups = groups._replace(has_spare_rows=True)
        total, out_RC = sum(counts_e), torch.zeros(sum(counts_e) + 2, HIDDEN).bfloat16()
        layer.experts.multiply(rows_RD, groups, None, out_RC)
        assert torch.equal(out_RC[:total], layer.expected(rows_RD, groups)[:total])
        assert not out_RC[total:].any()


def test_experts_stay_in_memory(tmp_path: Path) -> None:
    layer = StoredLayer(tmp_path, num_slots=3)
    layer.visit(0, 1, 2)
    assert layer.counts == (0, 3)
    for _ in range(4):
        layer.visit(2, 0)
    assert layer.counts == (8, 3)
    layer.visit(3)  # in place of 1, which was visited least
    layer.visit(0, 2, 3)
    assert layer.counts == (11, 4)
    assert layer.store.num_bytes >= 3 * sum(part[0][1] for part in layer.parts)


def test_a_visit_of_all_experts_leaves_the_favourites_in_memory(tmp_path: Path) -> None:
    layer = StoredLayer(tmp_path, num_slots=3)
    for _ in range(8):
        layer.visit(1, 4)
    layer.visit(*range(NUM_EXPERTS))
    found, read = layer.counts
    layer.visit(1, 4)
    assert layer.counts == (found + 2, read)


def test_random_visits_read_as_often_as_a_model_of_the_policy(tmp_path: Path) -> None:
    layer, num_slots, rng = StoredLayer(tmp_path, num_slots=3), 3, random.Random(0)
    scores, last, held, num_read = [0.0] * NUM_EXPERTS, [0] * NUM_EXPERTS, set[int](), 0
    for visit in range(1, 400):
        drawn = rng.choices(range(NUM_EXPERTS), weights=[8, 4, 2, 1, 1, 1, 1], k=rng.choice([1, 1, 2]))
        experts = sorted({*drawn})
        layer.visit(*experts)
        for expert in experts:
            scores[expert] = scores[expert] * 2 ** ((last[expert] - visit) / 64) + 1
            last[expert] = visit

        def score(expert: int, now: int = visit) -> float:
            return scores[expert] * 2 ** ((last[expert] - now) / 64)

        needed = {*experts} & held
        for number, expert in enumerate(sorted({*experts} - held)):
            num_read += 1
            if len(held) == num_slots:
                worst = min(held - needed, key=score)
                if number > 0 and score(worst) > score(expert):  # the visit waits until all others are computed
                    worst = min(held, key=score)
                held.remove(worst)
            held.add(expert)
            needed.add(expert)
        assert layer.counts[1] == num_read, visit


def test_half_of_the_memory_is_given_back(tmp_path: Path) -> None:
    """The experts that were visited most stay, wherever they lie; at least so many slots stay as are asked for."""
    layer = StoredLayer(tmp_path, num_slots=6)
    layer.visit(0, 1, 2, 3, 4, 5)
    for _ in range(3):
        layer.visit(5, 2, 4)
    num_bytes, before = layer.store.num_bytes, layer.counts
    layer.store.shrink(1)
    assert layer.store.num_slots == [3]
    assert layer.store.num_bytes == num_bytes // 2
    assert layer.store.totals()[4] == num_bytes // 2
    layer.visit(5, 2, 4)
    assert layer.counts == (before[0] + 3, before[1])
    layer.visit(*range(NUM_EXPERTS))
    layer.store.shrink(2)
    layer.store.shrink(2)
    assert layer.store.num_slots == [2]
    for expert in range(NUM_EXPERTS):
        layer.visit(expert)


@pytest.mark.parametrize(("slots", "least", "halvings"), [(6, 2, [3, 2]), (6, 1, [3, 1]), (1, 1, [])])
def test_memory_shrinks_while_too_little_is_free(
    slots: int, least: int, halvings: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line of the log for each time."""
    layer, free, now = StoredLayer(tmp_path, slots), [LEAST_FREE_BYTES], [0.0]
    served = ServedStore(layer.store, least, lambda: free[0], lambda: now[0])

    def begin_step() -> list[int]:
        now[0] += SECONDS_BETWEEN_LOOKS
        served.begin_step()
        return layer.store.num_slots

    layer.visit(*range(slots))
    assert begin_step() == [slots]
    free[0] = LEAST_FREE_BYTES - 1
    served.begin_step()
    assert layer.store.num_slots == [slots], "free memory is not looked at in every step"
    for expected in halvings:
        assert begin_step() == [expected]
        layer.visit(0, 3)
    assert begin_step() == ([slots, *halvings])[-1:]
    assert len(caplog.messages) == len(halvings)
    assert all("experts now take" in message for message in caplog.messages)


def test_visits_are_recorded(tmp_path: Path) -> None:
    layer = StoredLayer(tmp_path, num_slots=2)
    layer.visit(1)
    assert layer.store.record(is_on=True) == []
    layer.visit(5, 2)
    layer.visit(3)
    assert layer.store.record(is_on=False) == [(0, [2, 5]), (0, [3])]
    layer.visit(1)
    assert layer.store.record(is_on=False) == []


def read_one_row(layer: StoredLayer, expert: int, experts: CpuStoredExperts | None = None) -> Tensor:
    groups = RowGroups(torch.nn.functional.one_hot(torch.tensor(expert), NUM_EXPERTS))
    return (experts or layer.experts).multiply(torch.ones(1, HIDDEN).bfloat16(), groups, None, None)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("place", [0, 1, 100, -1])
def test_each_changed_byte_is_noticed(part: int, place: int, tmp_path: Path) -> None:
    """The outputs are NaN, the error names the expert, and the next visit reads again."""
    layer = StoredLayer(tmp_path, num_slots=1)
    offset, size, _ = layer.parts[part][3]
    content = bytearray(layer.path.read_bytes())
    content[offset + place % size] ^= 1
    with layer.path.open("r+b") as file:
        file.write(content)
    assert read_one_row(layer, 3).isnan().all()
    (error,) = layer.store.take_errors()
    assert error.startswith(f"expert 3 of layer 0 with experts, from byte {layer.parts[0][3][0]} of {layer.path} on, ")
    assert error.endswith("cannot be read: its checksum differs: the file was changed, or the disk is damaged")
    assert layer.store.take_errors() == []
    layer.visit(2)
    content[offset + place % size] ^= 1
    with layer.path.open("r+b") as file:
        file.write(content)
    layer.visit(3)


def test_other_rows_of_a_visit_with_an_unreadable_expert(tmp_path: Path) -> None:
    layer = StoredLayer(tmp_path, num_slots=2)
    with layer.path.open("r+b") as file:
        file.seek(layer.parts[1][5][0])
        file.write(b"damaged!")
    rows_RD, groups = torch.randn(NUM_EXPERTS, HIDDEN).bfloat16(), RowGroups(torch.ones(NUM_EXPERTS, dtype=torch.int64))
    output_RD = layer.experts.multiply(rows_RD, groups, None, None)
    assert output_RD[5].isnan().all()
    others = torch.arange(NUM_EXPERTS) != 5
    assert torch.equal(output_RD[others], layer.expected(rows_RD, groups)[others])


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    layer = StoredLayer(tmp_path, num_slots=2)
    with layer.path.open("r+b") as file:
        file.truncate(layer.parts[1][4][0])
    assert read_one_row(layer, 6).isnan().all()
    assert "the file ends before" in layer.store.take_errors()[0]


def test_errors_of_the_system_are_named(tmp_path: Path) -> None:
    """Reading address 0 of this process is an input/output error; this file cannot be read without the page cache."""
    layer = StoredLayer(tmp_path, num_slots=1)
    store, experts = layer.opened(Path("/proc/self/mem"))
    assert not store.is_direct
    assert read_one_row(layer, 0, experts).isnan().all()
    assert store.take_errors()[0].endswith("cannot be read: Input/output error")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        CpuExpertStore(NATIVE.native, str(tmp_path / "missing"))


def test_a_removed_file_stays_readable(tmp_path: Path) -> None:
    layer = StoredLayer(tmp_path, num_slots=1)
    layer.path.unlink()
    layer.visit(3)


def test_checksums() -> None:
    """A change of any byte changes them, and so does the length."""
    data = torch.randint(0, 256, (3, 1021), dtype=torch.uint8)
    before = NATIVE.native.checksums(data)
    assert len({*before}) == 3
    for place in (0, 7, 8, 63, 64, 1015, 1016, 1020):
        changed = data.clone()
        changed[1, place] ^= 128
        after = NATIVE.native.checksums(changed)
        assert (after[0], after[2]) == (before[0], before[2])
        assert after[1] != before[1]
    zeros = [NATIVE.native.checksums(torch.zeros(1, size, dtype=torch.uint8))[0] for size in range(130)]
    assert len({*zeros}) == 130
