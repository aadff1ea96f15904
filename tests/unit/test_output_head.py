"""Logits of a vocabulary that is divided over ranks."""

from __future__ import annotations

import torch
from build_contexts import with_tp
from thread_ranks import ThreadGroup, run
from torch import Tensor

from moeserve.layers.linear import OutputHead
from moeserve.layers.weights import allocate_weights

VOCAB_SIZE, WIDTH = 11, 6


def test_rows_are_whole_and_contiguous() -> None:
    """The kernel that finds the largest number of each row needs contiguous rows."""
    generator = torch.Generator().manual_seed(0)
    weight_VD = torch.randn(VOCAB_SIZE, WIDTH, generator=generator)
    hidden_LD = torch.randn(4, WIDTH, generator=generator)

    def work(group: ThreadGroup) -> list[Tensor]:
        head = OutputHead(VOCAB_SIZE, WIDTH, with_tp(group), tied_to=None)
        allocate_weights(head)
        with torch.inference_mode():
            head.weight.copy_(weight_VD[head.share.start : head.share.stop])
            return [head(hidden_LD[:num_rows]) for num_rows in (0, 1, 4)]

    for given in run(3, work):
        for num_rows, logits_LV in zip((0, 1, 4), given, strict=True):
            assert logits_LV.is_contiguous()
            torch.testing.assert_close(logits_LV, hidden_LD[:num_rows] @ weight_VD.T)
