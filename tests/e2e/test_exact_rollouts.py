"""Whatever happens to a request: its score is its log-probability bit for bit, and each token has its routes.

A plain engine computes all scores, so that they show what the bytes of an output do not depend on.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kv_peers import request
from rank_processes import living_ranks
from reference_models import Reference
from test_draft_layers import MTP, with_right_modules

from moeserve import LLM, SamplingParams
from moeserve.api.routes import OutputRoutes
from moeserve.kv.load_rates import LoadRates
from moeserve.outputs import RequestOutput
from moeserve.protocol import PeerBlocks, Request

NAMES = ["qwen3-moe", "deepseek-v3-four-heads", "qwen3-next"]
TEMPERATURE, NUM_TOKENS = 0.7, 14
SETTINGS: dict[str, Any] = dict(
    max_model_len=96,
    kv_cache_memory="8MiB",
    block_size=4,
    max_num_seqs=4,
    num_threads=1,
    enable_return_routed_experts=True,
    show_progress=False,
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load blocks though it may take longer than computing a tiny model."""
    monkeypatch.setattr(LoadRates, "pays", lambda _: True)


@dataclass
class Rollout:
    """A finished output."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    routes: Any  # [tokens - 1, layers, top_k]


@dataclass
class Case:
    """A model, prompts of which many begin alike, and the settings of all engines."""

    name: str
    reference: Reference
    folder: Path
    other: Path  # an empty folder
    settings: dict[str, Any]

    def engine(self, **options: Any) -> LLM:
        return LLM(str(self.folder), **SETTINGS | self.settings | options)

    def prompts(self, seed: int = 0) -> list[list[int]]:
        # States are saved after 64 tokens.
        long, short, *tails = self.reference.prompts(65, 17, 5, 3, 9, 2, seed=seed)
        return [[*long, *tails[0]], [*short, *tails[1]], [*long, *tails[2]], tails[2], [*short, *tails[0]], [7] * 20]


def params_of(prompts: Sequence[list[int]]) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
        for seed in range(len(prompts))
    ]


def rollout_of(output: RequestOutput) -> Rollout:
    (made,) = output.outputs
    assert made.logprobs is not None
    logprobs = [at[token].logprob for token, at in zip(made.token_ids, made.logprobs, strict=True)]
    return Rollout(output.prompt_token_ids, made.token_ids, logprobs, made.routed_experts)


def run(llm: LLM, prompts: list[list[int]]) -> list[Rollout]:
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [rollout_of(output) for output in llm.generate(inputs, params_of(prompts), use_tqdm=False)]


def run_through(llm: LLM, prompts: list[list[int]], change: Callable[[], object]) -> list[Rollout]:
    """Run prompts, and call `change` when three of them have some tokens."""
    streams = [llm.stream(prompt, each) for prompt, each in zip(prompts, params_of(prompts), strict=True)]
    begun = [next(stream) for stream in streams[:3]]
    change()
    ends = [[*begun[index : index + 1], *stream][-1] for index, stream in enumerate(streams)]
    return [rollout_of(output) for output in ends]


def from_host_memory(case: Case) -> list[Rollout]:
    size = 40960 if case.name == "qwen3-next" else 92160  # one layer in four of Qwen3-Next has keys
    if "dtype" in case.settings:  # bfloat16
        size //= 2
    with case.engine(kv_host_memory="16MiB", kv_cache_memory=size) as llm:
        rollouts = run(llm, case.prompts())
        for seed in range(1, 4):
            run(llm, case.prompts(seed))  # so that the blocks of the first are evicted
        rollouts += run(llm, case.prompts())
        assert llm.session.engine.replica_stats[0].num_loaded_tokens >= 64
    return rollouts


def from_a_folder(case: Case) -> list[Rollout]:
    settings: dict[str, Any] = dict(kv_folder=str(case.other / "blocks"), tensor_parallel_size=2)
    with case.engine(enable_return_routed_experts=False, **settings) as llm:  # its blocks have no routes
        llm.generate([{"prompt_token_ids": [5] * 30}], params_of([[]]), use_tqdm=False)
    with case.engine(**settings) as llm:
        rollouts = run(llm, [*case.prompts(), [5] * 30])
        sequences = [[*each.prompt, *each.token_ids[:-1]] for each in rollouts]
        blocks = {tuple(tokens[:end]) for tokens in sequences for end in range(4, len(tokens) + 1, 4)}
        while llm.session.engine.replica_stats[0].num_saved_blocks < len(blocks):
            rollouts += run(llm, [[5] * 30])  # it saves while it has something to do
    with case.engine(**settings) as llm:
        rollouts += run(llm, case.prompts())
        assert llm.session.engine.replica_stats[0].num_loaded_tokens >= 64
    return rollouts


def from_another_engine(case: Case) -> list[Rollout]:
    prompt = case.prompts()[0]
    params = msgspec.structs.replace(params_of([[]])[0].for_engine())
    both: dict[str, Any] = dict(kv_transfer_address="127.0.0.1")
    with (
        case.engine(pipeline_parallel_size=2, **both) as prefill,
        case.engine(tensor_parallel_size=2, **both) as decode,
    ):
        _, source = result_of(
            prefill,
            request(
                prompt_token_ids=prompt,
                params=msgspec.structs.replace(params, max_tokens=1),
                kv_handle=secrets.token_hex(16),
            ),
        )
        assert source is not None
        rollout, _ = result_of(decode, request(prompt_token_ids=prompt, params=params, kv_source=source))
        assert decode.session.engine.replica_stats[0].num_loaded_tokens >= 64
    return [rollout]


def result_of(llm: LLM, asked: Request) -> tuple[Rollout, PeerBlocks | None]:
    """Return the rollout of a request below the API, and its blocks if they are kept for another engine."""
    shape = llm.config.experts.routes
    assert shape is not None
    routes = OutputRoutes(shape, len(asked.prompt_token_ids))
    llm.core.add(asked)
    tokens: list[int] = []
    logprobs: list[float] = []
    blocks = None
    while llm.core.has_work:
        for update in llm.core.step():
            tokens += update.token_ids
            logprobs += [each.logprobs[0] for each in update.logprobs]
            routes.add(update.routes)
            blocks = blocks or update.kv_blocks
    return Rollout(asked.prompt_token_ids, tokens, logprobs, routes.array(len(tokens))), blocks


def after_a_killed_rank(case: Case) -> list[Rollout]:
    rollouts: list[Rollout] = []
    with case.engine(data_parallel_size=2, tensor_parallel_size=2, on_failure="recover") as llm:
        for rank in (1, 2):
            rollouts += run_through(llm, case.prompts(), living_ranks()[rank].kill)
    return rollouts


def with_another_replica(case: Case) -> list[Rollout]:
    with case.engine(executor="mp") as llm:
        rollouts = run_through(llm, case.prompts(), lambda: llm.scale(2))
        return rollouts + run(llm, case.prompts())


def with_right_drafts(case: Case) -> list[Rollout]:
    with case.engine(speculative_config=MTP) as llm:
        rollouts = [*run(llm, case.prompts()), *run(llm, case.prompts())]
        assert llm.session.engine.replica_stats[0].speculation.num_accepted_tokens > 0
    return rollouts


def with_ngrams(case: Case) -> list[Rollout]:
    with case.engine(speculative_config=NGRAM) as llm:
        rollouts = run(llm, case.prompts())
        assert llm.session.engine.replica_stats[0].speculation.num_drafts > 0
    return rollouts


def with_everything_small(case: Case) -> list[Rollout]:
    """Chunks, cached prefixes and preemptions."""
    with case.engine(kv_cache_memory="80KiB", max_num_batched_tokens=7) as llm:
        return [*run(llm, case.prompts()), *run(llm, case.prompts())]


def with_two_replicas(case: Case) -> list[Rollout]:
    with case.engine(data_parallel_size=2, tensor_parallel_size=2) as llm:
        return [*run(llm, case.prompts()), *run(llm, case.prompts())]


WAYS = [
    from_host_memory,
    from_a_folder,
    from_another_engine,
    after_a_killed_rank,
    with_another_replica,
    with_right_drafts,
    with_ngrams,
    with_everything_small,
    with_two_replicas,
]
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": dict(dtype="bfloat16", quantization="int8"),
    "int4": dict(dtype="bfloat16", quantization="int4"),
}


@pytest.mark.ranks
@pytest.mark.slow_but(
    "from_host_memory-qwen3-next-float32-raw",
    "from_a_folder-deepseek-v3-four-heads-int8-processed",
    "from_another_engine-qwen3-moe-float32-processed",
    "after_a_killed_rank-qwen3-moe-int4-processed",
    "with_another_replica-qwen3-moe-float32-raw",
    "with_right_drafts-qwen3-next-int8-processed",
)
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_scores_and_routes_are_exact(
    way: Callable[[Case], list[Rollout]],
    name: str,
    form: str,
    mode: str,
    reference_named: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    reference = reference_named(name)
    folder, other = reference.folder, tmp_path / "other"
    other.mkdir()
    if way is with_right_drafts:
        if name == "qwen3-moe":
            pytest.skip("has no modules for drafts")
        reference = reference_named(name.removesuffix("-four-heads"))
        folder = tmp_path / "model"
        folder.mkdir()
        with_right_modules(reference, folder, others=0.3)
    settings = dict(FORMS[form], logprobs_mode=f"{mode}_logprobs")
    case = Case(name, reference, folder, other, settings)
    rollouts = way(case)
    assert {len(rollout.token_ids) for rollout in rollouts} == {NUM_TOKENS}
    at = {"temperature": TEMPERATURE} if mode == "processed" else {}
    with case.engine() as llm:
        scores = llm.score(
            [[*rollout.prompt, *rollout.token_ids] for rollout in rollouts],
            [len(rollout.prompt) for rollout in rollouts],
            use_tqdm=False,
            **at,
        )
    for rollout, score in zip(rollouts, scores, strict=True):
        assert rollout.logprobs == score.logprobs
        assert rollout.routes is not None
        assert score.routed_experts is not None
        assert np.array_equal(rollout.routes, score.routed_experts)
        assert len(rollout.routes) == len(rollout.prompt) + NUM_TOKENS - 1
