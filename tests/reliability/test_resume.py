"""Killed ranks of an engine that restarts: every request completes with the tokens it would have had."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_processes import living_ranks
from reference_models import Reference
from safetensors.torch import load_file, save_file

from moeserve import LLM, EngineError, SamplingParams, ScaleError, WeightsChangedError

pytestmark = pytest.mark.ranks

NUM_TOKENS = 60
SETTINGS: dict[str, Any] = dict(dtype="float32", max_model_len=256, kv_cache_memory="8MiB", max_num_seqs=8)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2dp2": dict(tensor_parallel_size=2, data_parallel_size=2),
    "pp2dp2": dict(pipeline_parallel_size=2, data_parallel_size=2),
    "ray": dict(executor="ray", data_parallel_size=2, num_threads=1, debug_rank_state=True),
}
SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]


# Killed ranks of Ray are also in tests/distributed/test_multi_node.py.
@pytest.fixture(scope="module", params=["tp2dp2", "pp2dp2", pytest.param("ray", marks=SOAK)])
def llm(request: pytest.FixtureRequest, reference_named: Callable[[str], Reference]) -> Iterator[LLM]:
    if request.param == "ray":
        pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")  # other tests may have started a cluster of several hosts
        with LLM(reference_named("mixtral").folder, **LAYOUTS[request.param], **SETTINGS) as llm:
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


def replace_weights(folder: Path, *, same_size_and_time: bool) -> None:
    """Replace a checkpoint's weights by others, as a copy of another model into its folder does."""
    path = folder / "model.safetensors"
    status, tensors = path.stat(), load_file(path)
    save_file({name: -tensor for name, tensor in tensors.items()}, folder / "new", {"format": "pt"})
    if same_size_and_time:
        os.utime(folder / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(folder / "new", path)


@pytest.mark.parametrize(
    ("same_size_and_time", "executor"),
    [(False, "mp"), (True, "mp"), pytest.param(False, "ray", marks=SOAK)],
)
def test_replaced_weights_are_never_served(
    reference_named: Callable[[str], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    same_size_and_time: bool,
    executor: str,
) -> None:
    """Neither by more replicas nor after a failure. The requests end with an error that names the file."""
    reference = reference_named("mixtral")
    shutil.copytree(reference.folder, tmp_path / "model")
    (prompt,) = reference.prompts(9)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with LLM(tmp_path / "model", executor=executor, num_threads=1, **SETTINGS) as llm:
        replace_weights(tmp_path / "model", same_size_and_time=same_size_and_time)
        named = r"model\.safetensors" if executor == "mp" else None  # Ray's cluster may have no room for two
        with pytest.raises(ScaleError, match=named):
            llm.scale(2)
        (output,) = llm.generate([prompt], greedy, use_tqdm=False)
        assert [output.outputs[0].token_ids] == reference.continuations([prompt], 8)
        stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        next(stream)
        living_ranks()[0].kill()
        error = ""
        try:
            list(stream)
        except EngineError as caught:
            error = str(caught)
        assert not error or "model.safetensors" in error, "or the request ended before its rank"
        with pytest.raises(WeightsChangedError, match=r"model\.safetensors"):
            llm.generate([prompt], greedy)
