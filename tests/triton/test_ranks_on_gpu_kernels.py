"""Two ranks on Triton kernels in Triton's interpreter: float32 tokens equal those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from joining import join
from ranks import Place, Ranks
from reference_models import Reference
from small_steps import border, bytes_of_tokens

NUM_TOKENS = 4


def generate(place: Place, folder: str, tp: int, prompts: list[list[list[int]]]) -> list[list[int]]:
    """Run `generate` of test_layouts.py on one of several ranks, with Triton kernels."""
    import test_layouts

    from moeserve.ops import select
    from moeserve.ops.triton.table import TRITON_KERNELS

    groups = join(place, tp, timeout_s=100)
    on_gpu = mock.patch.dict(select.TABLES, cpu=lambda: TRITON_KERNELS)
    fewer = mock.patch.object(test_layouts, "NUM_TOKENS", NUM_TOKENS)
    large_from = bytes_of_tokens(folder, 3)  # prompts are large steps, later steps are small
    with on_gpu, fewer, border(large_from, lambda is_small: None):
        tokens, _, _ = test_layouts.generate(groups, folder, "all_to_all", prompts)
    groups.leave("done")
    return tokens


def test_tokens_of_two_ranks(reference_named: Callable[[str], Reference]) -> None:
    """Run one replica of two ranks, whose logits are computed by both, and two replicas."""
    reference = reference_named("mixtral")
    prompts = reference.clear_prompts((1, 9), NUM_TOKENS)
    expected = [reference.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    ranks = Ranks()  # separate processes, because each process selects its kernels once
    function = "test_ranks_on_gpu_kernels:generate"
    arguments = dict(folder=str(reference.folder))
    try:
        assert ranks.run(2, function, 200.0, tp=2, prompts=[prompts], **arguments) == [expected] * 2
        of_each = [[prompt] for prompt in prompts]
        assert ranks.run(2, function, 200.0, tp=1, prompts=of_each, **arguments) == [[tokens] for tokens in expected]
    finally:
        ranks.close()
