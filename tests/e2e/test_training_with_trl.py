"""The programs of examples/rl train with TRL, and hold what docs/rl.md says of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="install it with: pip install 'trl==1.16.*'")

EXAMPLES = Path(__file__).parents[2] / "examples" / "rl"
RANDOM_REWARD = 6 / 66  # of words drawn evenly
MOST_DIFFERENCE = 1e-4  # nats, between the engine's log-probabilities and the trainer's
# In 4 steps a model learns little; in 80, most of it.
RUNS = [(0, 4), *(pytest.param(seed, 80, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]) for seed in range(3))]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "num_steps"), RUNS)
@pytest.mark.parametrize("program", ["grpo.py", "grpo_server.py"])
def test_a_model_learns_from_exact_outputs(program: str, seed: int, num_steps: int, tmp_path: Path) -> None:
    """In each step the engine has the weights of a fresh load, and its log-probabilities are the trainer's."""
    curve = tmp_path / "rewards.json"
    command = [sys.executable, str(EXAMPLES / program), "--seed", str(seed), "--steps", str(num_steps)]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES / "as_vllm")}
    run = subprocess.run(
        [*command, "--curve", str(curve), "--checksums"], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    rewards = json.loads(curve.read_text())
    assert len(rewards) == num_steps
    difference, num_compared = re.findall(r"difference/max: at most (\S+) in (\d+) steps", run.stdout)[0]
    assert float(difference) <= MOST_DIFFERENCE
    assert int(num_compared) == num_steps
    assert f"{num_steps} updates gave the weights of a new engine" in run.stdout
    if num_steps == 80:
        assert sum(rewards[-10:]) / 10 >= 3 * RANDOM_REWARD
