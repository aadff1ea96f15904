"""A request's results have the same bytes with every number of tp ranks that divides the model's chunks of inputs.

The reference is one rank that computes one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import transformers
from random_shapes import FAMILIES
from reference_models import Reference, make_reference
from small_steps import MIDDLE, PlantedBorder, bytes_of_tokens
from test_same_bytes import Results, generate, make_prompts

from moeserve.models.registry import describe
from moeserve.ops.native import native_kernels

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels are not built"),
]

MAX_RANKS = 8
NUM_SOAK_CASES = 50  # of 10 requests each


@dataclass(frozen=True)
class Case:
    """A random model on disk, requests for it, and a random layout."""

    reference: Reference
    prompts: list[list[int]]
    options: dict[str, Any]  # of both layouts
    layout: dict[str, Any]
    max_small_tokens: int | None  # see small_steps.py

    @property
    def summary(self) -> str:
        config = self.reference.model.config.to_diff_dict()
        return f"{self.layout}, {self.options}, small steps up to {self.max_small_tokens} tokens, {config}"


def make_case(folder: Path, family: str, seed: int, num_prompts: int) -> Case:
    dice = Random(f"{family} {seed}")
    transformers.utils.logging.disable_progress_bar()
    reference = make_reference(folder, FAMILIES[family](dice))
    prompts = [
        [dice.randrange(3, reference.vocab_size) for _ in range(int(90 ** dice.random()))] for _ in range(num_prompts)
    ]
    options = dict(
        dtype=dice.choice(["bfloat16", "bfloat16", "float32"]), quantization=dice.choice([None, None, "int8", "int4"])
    )
    layout = dict(
        **random_mesh(dice, reference),
        dispatcher=dice.choice(["allgather", "all_to_all", "shared_memory"]),
        max_num_batched_tokens=dice.choice([13, 40, 200]),
        max_num_seqs=dice.choice([4, 16]),
        block_size=dice.choice([4, 16]),
        enable_prefix_caching=dice.random() < 0.5,
        kv_cache_memory="8MiB",
        num_threads=dice.choice([1, 1, 2]),
        executor="mp",
        overlap_decode_tokens=dice.choice([None, 1, 3]),
        overlap_prefill_tokens=dice.choice([None, 1, 12]),
    )
    if describe(str(reference.folder)).model.needs.keeps_state:  # which overlapped steps are refused with
        layout |= dict(overlap_decode_tokens=None, overlap_prefill_tokens=None)
    return Case(reference, prompts, options, layout, dice.choice([None, MIDDLE, 0]))


def random_mesh(dice: Random, reference: Reference) -> dict[str, int]:
    """Return a layout with several tp ranks that keeps the bytes of one."""
    model = describe(str(reference.folder)).model
    sizes = [size for size in model.tensor_parallel_sizes if size > 1 and model.keeps_bytes(size)]
    assert {2, 4, 8} & {*model.tensor_parallel_sizes} <= {*sizes}
    tp = dice.choice(sizes)
    dp = dice.choice([size for size in (1, 2, 3) if size * tp <= MAX_RANKS])
    pp = dice.choice([size for size in (1, 2) if size * dp * tp <= MAX_RANKS])
    return dict(tensor_parallel_size=tp, data_parallel_size=dp, pipeline_parallel_size=pp)


def run(case: Case, folder: Path, *, environment: dict[str, str] | None = None) -> tuple[Results, Results]:
    """Return the results of one rank, one request at a time, and those of the layout, all at once."""
    expected = generate(case.reference, case.prompts, alone=True, enable_prefix_caching=False, **case.options)
    max_small = case.max_small_tokens
    dtype = case.options["dtype"]
    max_small_bytes = None if max_small is None else bytes_of_tokens(case.reference.folder, max_small, dtype)
    environment = environment or PlantedBorder(folder, max_small_bytes).environment
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return expected, generate(case.reference, case.prompts, **case.options, **case.layout)


@pytest.mark.slow_but("mixtral")
@pytest.mark.parametrize("family", FAMILIES)
def test_random_shapes(family: str, tmp_path: Path) -> None:
    case = make_case(tmp_path / "model", family, seed=0, num_prompts=6)
    expected, found = run(case, tmp_path)
    assert found == expected, case.summary


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_500_requests_of_random_shapes(tmp_path: Path) -> None:
    num_requests = 0
    for seed in range(1, NUM_SOAK_CASES + 1):
        family = list(FAMILIES)[seed % len(FAMILIES)]
        folder = tmp_path / str(seed)
        folder.mkdir()
        case = make_case(folder / "model", family, seed, num_prompts=10)
        expected, found = run(case, folder)
        assert found == expected, (seed, case.summary)
        num_requests += len(found)
    assert num_requests == 500


@pytest.mark.parametrize(("place", "num_ranks"), [("chunks", 2), ("ranks", 4)])
def test_another_order_of_one_sum_is_found(
    place: str, num_ranks: int, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    layout = dict(tensor_parallel_size=num_ranks, kv_cache_memory="8MiB", executor="mp")
    case = Case(reference_named("qwen3-moe-eight-heads"), make_prompts(6), dict(dtype="float32"), layout, None)
    expected, found = run(case, tmp_path, environment={"MOESERVE_TEST_PLANT": f"planted_sums:{place}"})
    assert found != expected
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected], "more than the last bits differ"
    assert run(case, tmp_path) == (expected, expected)
