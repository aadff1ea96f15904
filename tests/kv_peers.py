"""Engines that compute prompts for each other, below the API."""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from moeserve import LLM, SamplingParams
from moeserve.protocol import PeerBlocks, Request, RequestUpdate, Sample

BLOCK = 16
NUM_BLOCKS = 5  # full ones of the prompt
PROMPT = random.Random(1).choices(range(100), k=NUM_BLOCKS * BLOCK + 3)
PARAMS = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True).for_engine()
LAYOUTS = {"1": (1, 1), "tp 2": (2, 1), "pp 2": (1, 2)}
request_ids = map(str, itertools.count())


@contextmanager
def engine(model: Path, layout: str = "1", **settings: Any) -> Iterator[LLM]:
    tp, pp = LAYOUTS[layout]
    defaults = dict(kv_transfer_address="127.0.0.1", num_threads=1, kv_cache_memory="1MiB", dtype="float32")
    sizes = dict(tensor_parallel_size=tp, pipeline_parallel_size=pp, max_model_len=128, block_size=BLOCK)
    llm = LLM(model, show_progress=False, **{**defaults, **sizes, **settings})
    try:
        yield llm
    finally:
        llm.shutdown()


def serve(llm: LLM, num_samples: int = 1, **fields: Any) -> list[RequestUpdate]:
    """Return the last update of each output of the prompt, with all of its tokens."""
    request = Request(
        **{"request_id": next(request_ids), "prompt_token_ids": PROMPT, "params": PARAMS, "seed": 3, **fields}
    )
    samples = [Sample(next(request_ids), 3) for _ in range(num_samples - 1)]
    llm.core.add(request, samples)
    tokens: dict[str, list[int]] = {}
    last = {}
    while llm.core.has_work:
        for update in llm.core.step():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            if update.finish_reason is not None:
                last[update.request_id] = msgspec.structs.replace(update, token_ids=tokens[update.request_id])
    return list(last.values())


def compute_prompt(llm: LLM) -> PeerBlocks:
    """Let an engine compute the prompt and keep its blocks."""
    params = msgspec.structs.replace(PARAMS, max_tokens=1)
    (update,) = serve(llm, params=params, kv_handle=secrets.token_hex(16))
    assert update.kv_blocks is not None
    return update.kv_blocks


def require_all_free(llm: LLM) -> None:
    """Fail unless all blocks become free."""
    deadline = time.monotonic() + 30
    while any(stats.num_free_blocks < llm.core.num_blocks for stats in llm.core.replica_stats):
        assert time.monotonic() < deadline, "blocks were not set free"
        serve(llm, prompt_token_ids=[1])  # engines without requests look at nothing
