"""A trainer on one host sends weights to the ranks of a server on another."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import hosts, why_impossible
from reference_models import Reference
from safetensors.torch import load_file, save_file

from moeserve import LLM

PROGRAM = Path(__file__).parent / "weights_program.py"


@pytest.mark.ranks
def test_a_trainer_on_another_host(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    if reason := why_impossible():
        pytest.skip(reason)
    folder = reference_named("qwen3-moe").folder
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    save_file({name: -0.5 * tensor for name, tensor in tensors.items()}, new / "model.safetensors", {"format": "pt"})
    with LLM(str(new), tensor_parallel_size=2, rl=True, max_model_len=64, show_progress=False) as llm:
        expected = llm.weight_checksums()
    flags = ["--rl", "--admin-key", "admin", "--host", "0.0.0.0", "--port", "8000", "--max-model-len", "64"]
    with hosts(2) as (first, second):
        serving = [sys.executable, "-m", "moeserve", "serve", str(folder), "--tensor-parallel-size", "2", *flags]
        first.start(serving, tmp_path / "server.log", OMP_WAIT_POLICY="passive")
        command = [sys.executable, str(PROGRAM), f"http://{first.address}:8000", str(new / "model.safetensors")]
        trainer = second.start([*command, str(tmp_path / "result")], tmp_path / "trainer.log")
        status = trainer.wait(200)
        assert status == 0, "".join((tmp_path / f"{name}.log").read_text() for name in ("server", "trainer"))
    found = json.loads((tmp_path / "result").read_text())
    assert found["wrong key"][0] == 409
    assert "closed the connection" in found["wrong key"][1]
    assert found["checksums"] == expected
