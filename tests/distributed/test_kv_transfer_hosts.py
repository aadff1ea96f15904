"""An engine continues prompts that one on another host has computed, over a cable that loses packets."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import LossyCable, hosts, why_impossible
from kv_peer_program import Served, read
from kv_peers import BLOCK, NUM_BLOCKS, engine, serve
from reference_models import Reference

PROGRAM = Path(__file__).parent / "kv_peer_program.py"
NUM_PROMPTS = 30
LOSS = 0.01


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("layouts", [("1", "tp 2"), ("tp 2", "1")])
@pytest.mark.parametrize("name", ["mixtral-three-layers", "deepseek-v3-four-heads"])
def test_packets_that_are_lost(
    name: str, layouts: tuple[str, str], reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    if reason := why_impossible():
        pytest.skip(reason)
    model = reference_named(name).folder
    (tmp_path / "key").write_text(secrets.token_hex(16))
    with engine(model) as llm:
        (expected,) = serve(llm)
    with hosts(2) as machines:
        cable = LossyCable(machines, LOSS)
        try:
            runs = [
                host.start(
                    [sys.executable, str(PROGRAM), role, str(model), layout, address, str(NUM_PROMPTS), str(tmp_path)],
                    tmp_path / f"{role}.log",
                    OMP_WAIT_POLICY="passive",
                )
                for host, role, layout, address in zip(
                    machines, ("prefill", "decode"), layouts, ("10.78.0.1", "10.78.0.2"), strict=True
                )
            ]
            logs = [tmp_path / "prefill.log", tmp_path / "decode.log"]
            assert [run.wait(120) for run in runs] == [0, 0], "\n".join(log.read_text() for log in logs)
        finally:
            cable.close()
    served = read(tmp_path / "served", Served)
    assert served.token_ids == [expected.token_ids] * NUM_PROMPTS
    assert served.num_cached_tokens == [NUM_BLOCKS * BLOCK] * NUM_PROMPTS
    assert cable.num_lost > 3
    assert cable.num_lost < 2 * LOSS * cable.num_passed
