"""A decode step of a GPU: the host waits for nothing, and launches the same few operations for any batch."""

from __future__ import annotations

import pytest
from torch import Tensor

from moeserve.bench import host_step
from moeserve.worker import model_runner


@pytest.mark.parametrize(("temperature", "most_operations"), [(0.0, 7), (1.0, 13)])
def test_operations_of_a_step(temperature: float, most_operations: int) -> None:
    """Tensors of the device have no values, so a step that read one would fail."""
    numbers = [host_step.measure(size, 40, temperature, num_steps=20)[1] for size in (1, 9)]
    assert numbers[0] == numbers[1] <= most_operations


def test_a_step_that_waits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = model_runner.with_random_tokens

    def choose_and_look(tokens_L: Tensor, *arguments: object) -> Tensor:
        tokens_L = choose(tokens_L, *arguments)  # type: ignore[arg-type]
        assert tokens_L.tolist()
        return tokens_L

    monkeypatch.setattr(model_runner, "with_random_tokens", choose_and_look)
    with pytest.raises(Exception, match="meta"):
        host_step.measure(2, 40, 1.0, num_steps=2)
