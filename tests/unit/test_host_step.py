"""A decode step of a GPU: the host waits for nothing, and launches the same few operations for any batch."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.bench import host_step
from moeserve.worker import model_runner
from moeserve.worker.sampler import SampledRows

MOST_OPERATIONS = {"greedy": 12, "random": 12, "min_tokens": 23, "logit_bias": 23, "logprobs": 38}


@pytest.mark.parametrize("kind", host_step.KINDS)
def test_operations_of_a_step(kind: str) -> None:
    """Tensors of the device have no values, so a step that read one would fail."""
    numbers = [host_step.measure(size, 40, host_step.KINDS[kind], num_steps=20)[1] for size in (1, 9)]
    assert numbers[0] == numbers[1] <= MOST_OPERATIONS[kind]


@pytest.mark.parametrize("kind", ["random", "logprobs"])
def test_a_step_that_waits_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = model_runner.sample

    def sample_and_look(*arguments: Any, **options: Any) -> SampledRows:
        rows = sample(*arguments, **options)
        assert rows.tokens_L.tolist()
        return rows

    monkeypatch.setattr(model_runner, "sample", sample_and_look)
    with pytest.raises(Exception, match="meta"):
        host_step.measure(2, 40, host_step.KINDS[kind], num_steps=2)
