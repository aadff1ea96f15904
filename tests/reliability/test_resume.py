"""Killed ranks of an engine that restarts: every request completes with the tokens it would have had."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rank_processes import living_ranks
from reference_models import Reference

from moeserve import LLM, SamplingParams

pytestmark = pytest.mark.ranks

NUM_TOKENS = 60
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2dp2": dict(tensor_parallel_size=2, data_parallel_size=2, on_failure="restart"),
    "pp2dp2": dict(pipeline_parallel_size=2, data_parallel_size=2, on_failure="restart"),
    "ray": dict(executor="ray", data_parallel_size=2, num_threads=1, debug_rank_state=True),
}
SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]


# Killed ranks of Ray are also in tests/distributed/test_multi_node.py.
@pytest.fixture(scope="module", params=["tp2dp2", "pp2dp2", pytest.param("ray", marks=SOAK)])
def llm(request: pytest.FixtureRequest, reference_named: Callable[[str], Reference]) -> Iterator[LLM]:
    if request.param == "ray":
        pytest.importorskip("ray")
    settings: dict[str, Any] = dict(dtype="float32", max_model_len=256, kv_cache_memory="8MiB", max_num_seqs=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")  # other tests may have started a cluster of several hosts
        with LLM(reference_named("mixtral").folder, **LAYOUTS[request.param], **settings) as llm:
            yield llm


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [1, pytest.param(50, marks=SOAK)])
def test_requests_survive_killed_ranks(
    llm: LLM, reference_named: Callable[[str], Reference], caplog: pytest.LogCaptureFixture, num_kills: int
) -> None:
    """Greedy and seeded requests, more than run at once. A rank is killed after a random number of tokens."""
    dice = random.Random(1)
    prompts = reference_named("mixtral").prompts(*[3, 17, 9, 30] * 5, seed=2)
    params = [
        SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=NUM_TOKENS, ignore_eos=True)
        for index in range(len(prompts))
    ]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    for kill in range(num_kills):
        streams = [llm.stream(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        for _ in range(1 + dice.randrange(NUM_TOKENS // 2)):
            next(streams[0])
        victim = dice.choice(living_ranks())
        name = victim.name()
        os.kill(victim.pid, signal.SIGKILL)
        started = time.monotonic()
        outputs = [list(stream)[-1].outputs[0] for stream in streams]
        print(f"kill {kill}, of {name}: all ended {time.monotonic() - started:.1f} s later", file=sys.stderr)
        assert [output.token_ids for output in outputs] == expected
        assert {output.finish_reason for output in outputs} == {"length"}
        assert len(caplog.messages) == kill + 1
        if name.startswith("rank "):  # not an actor
            assert f"{name} (replica" in caplog.messages[-1], caplog.messages
            assert ("stage" in caplog.messages[-1]) == (len(llm.config.parallel.pipeline_layers) > 1)
