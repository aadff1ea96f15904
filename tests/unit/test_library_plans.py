"""Plans of FlashInfer's wrappers while the GPU still copies earlier ones, with stand-ins for both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention_stand_ins
import latent_stand_ins
import pytest
import torch
from torch import Tensor

from moeserve.ops.attention import flashinfer as flashinfer_attention
from moeserve.ops.attention import plans
from moeserve.ops.attention.flashinfer import FlashInfer, open_flashinfer
from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.ops.latent_attention import flashinfer as flashinfer_latent
from moeserve.ops.latent_attention.flashinfer import FlashInferLatent, LatentProblem

sys.path.append(str(Path(__file__).parent.parent / "kernels"))
from attention_cases import Case, Shape, make_case

# T tokens, N heads, K unrotated values of a head's key, E rotated ones, V values of a head, L latent size

CPU = torch.device("cpu")
HEAD_SIZE = 64
N, L, K, E, V = 4, 128, 128, 64, 128
CHUNKS = ([(3, 20), (9, 40)], [(9, 9)], [(2, 2), (9, 64), (1, 5)])  # of three steps
Run = Callable[[], Tensor]


class SlowCopies:
    """A GPU that ends no copy before someone waits for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.under_way: set[Any] = set()  # wrappers
        patch.setattr(plans, "started_copies", lambda device: Waiting(self.under_way, set(self.under_way)))

    def watch(self, wrapper_type: type, patch: pytest.MonkeyPatch) -> None:
        plan = wrapper_type.plan  # type: ignore[attr-defined]

        def checked_plan(wrapper: Any, *args: Any, **options: Any) -> None:
            assert wrapper not in self.under_way, "a plan is overwritten while it is copied"
            self.under_way.add(wrapper)
            plan(wrapper, *args, **options)

        patch.setattr(wrapper_type, "plan", checked_plan)


class Waiting:
    def __init__(self, under_way: set[Any], before: set[Any]) -> None:
        self.under_way, self.before = under_way, before

    def synchronize(self) -> None:
        self.under_way -= self.before


def chunk_runs(copies: SlowCopies, patch: pytest.MonkeyPatch) -> list[Run]:
    attention_stand_ins.install(patch, attention_stand_ins.strict())
    patch.setattr(flashinfer_attention, "DECODE_WORKSPACE", attention_stand_ins.SEMAPHORES + 8192)
    copies.watch(sys.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper, patch)
    shape = AttentionShape(num_heads=N, num_kv_heads=2, head_size=HEAD_SIZE, dtype=torch.bfloat16, scale=0.125)
    attend = FlashInfer(open_flashinfer(CPU), CPU, 16).make_attend(shape, "chunks")
    cases = cases_of(Shape(N, 2, HEAD_SIZE, scale=0.125))
    return [
        lambda case=case: attend(case.query_TNH, KeyValueCache(case.key_cache, case.value_cache), case.step)
        for case in cases
    ]


def absorbed_runs(copies: SlowCopies, patch: pytest.MonkeyPatch) -> list[Run]:
    package = latent_stand_ins.make_package()
    copies.watch(package.mla.BatchMLAPagedAttentionWrapper, patch)
    problem = LatentProblem(True, N, L, E, L, torch.bfloat16, 0.07)
    absorbed = FlashInferLatent(package, CPU).make_absorbed(problem)
    return [
        lambda case=case: absorbed(case.query_TNH, case.key_cache[:, 0], case.step, 64)
        for case in cases_of(Shape(N, 1, L + E, latent_size=L, scale=0.07))
    ]


def expanded_runs(copies: SlowCopies, patch: pytest.MonkeyPatch) -> list[Run]:
    patch.setattr(flashinfer_latent, "MAX_EXPANDED_BYTES", 20 * N * (2 * K + E + V) * 2)  # 20 positions of a prefix
    package = latent_stand_ins.make_package()
    copies.watch(package.BatchPrefillWithRaggedKVCacheWrapper, patch)
    expanded = FlashInferLatent(package, CPU).make_expanded(LatentProblem(False, N, K, E, V, torch.bfloat16, 0.07))
    generator = torch.Generator().manual_seed(1)
    key_NLK, value_NLV = (torch.randn(N, L, size, generator=generator).bfloat16() / 16 for size in (K, V))

    def run(case: Case) -> Tensor:
        out_TNV = torch.zeros(len(case.query_TNH), N, V, dtype=torch.bfloat16)
        query_TNK, query_TNE = case.query_TNH.split([K, E], dim=-1)
        expanded(
            query_TNK,
            query_TNE,
            case.key_cache[:, 0],
            case.step,
            8,
            lambda latent_CL, heads=slice(None): (latent_CL @ key_NLK[heads], latent_CL @ value_NLV[heads]),
            out_TNV,
        )
        return out_TNV

    return [lambda case=case: run(case) for case in cases_of(Shape(N, 1, L + E, latent_size=L, scale=0.07))]


def cases_of(shape: Shape) -> list[Case]:
    return [
        make_case(chunks, shape, block_size=16, dtype=torch.bfloat16, seed=seed, unread=100.0)
        for seed, chunks in enumerate(CHUNKS)
    ]


@pytest.mark.parametrize("runs_of", [chunk_runs, absorbed_runs, expanded_runs])
def test_no_plan_is_overwritten_while_it_is_copied(
    runs_of: Callable[[SlowCopies, pytest.MonkeyPatch], list[Run]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps follow each other, and two may be computed by turns. Each has the results that it has alone."""
    monkeypatch.setattr(flashinfer_latent, "WORKSPACE", 8192)
    alone = [runs_of(SlowCopies(monkeypatch), monkeypatch)[number]() for number in range(len(CHUNKS))]
    runs = runs_of(SlowCopies(monkeypatch), monkeypatch)
    for number in (0, 1, 0, 1, 2, 2, 0, 2, 1):
        assert torch.equal(runs[number](), alone[number])
