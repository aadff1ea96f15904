"""Conversations with and without a store behind the KV cache.

    python -m moeserve.bench.kv_store [--model NAME ...] [--conversations 16] [--turns 4] [--rounds 2] [--json PATH]

- *conversations*: take turns, with one request each. A request has all previous tokens of its conversation, and some
  new ones. Between two turns of a conversation come all others, and the KV cache holds a fourth of all their tokens.
- *memory*: blocks evicted from the cache are loaded from the host's memory (`kv_host_memory`). *recomputation*: they
  are computed again, as without a store.
- *new tokens/s*: output tokens over the time of all requests, four at a time. *computed*: the fraction of prompt and
  output tokens that the model computed; the rest came from the cache or the store. Each round has new conversations,
  the same for both engines; their tokens must be equal.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeserve import LLM, SamplingParams
from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.harness import Row, add_models, at_least, make_parser, ratio_of_medians
from moeserve.bench.report import show_and_save
from moeserve.models.inspection import inspect
from moeserve.ops.native import set_num_threads

MODELS = ("qwen3-mini", "deepseek-mini")
FIRST_TOKENS, TURN_TOKENS, NEW_TOKENS = 512, 128, 16
AT_A_TIME = 4  # number of concurrent requests


@dataclass(frozen=True)
class Round:
    """The result of an engine in one round."""

    seconds: float
    computed: float  # fraction of all tokens


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(
        "python -m moeserve.bench.kv_store", "Conversations with a store behind the KV cache.", rounds=2
    )
    add_models(parser, MODELS)
    parser.add_argument("--conversations", type=at_least(AT_A_TIME), default=16)
    parser.add_argument("--turns", type=at_least(2), default=4)
    options = parser.parse_args(arguments)
    set_num_threads(options.threads)
    for model in map(find_checkpoint, options.model or MODELS):
        rows = measure(str(model), options.conversations, options.turns, options.rounds, options.threads)
        show_and_save(options.json, [{"benchmark": "kv_store", "model": model.name} | row for row in rows])


def measure(model: str, num_conversations: int, num_turns: int, num_rounds: int, num_threads: int) -> list[Row]:
    """Return one row for each engine.

    Raises:
        ValueError: the engines have generated different tokens.
    """
    length = FIRST_TOKENS + num_turns * (TURN_TOKENS + NEW_TOKENS)
    bytes_per_token = inspect(Path(model), "bfloat16").cache.bytes_per_token
    all_bytes = num_conversations * length * bytes_per_token
    settings: dict[str, Any] = dict(
        dtype="bfloat16", device="cpu", num_threads=num_threads, max_model_len=length, max_num_seqs=AT_A_TIME,
        kv_cache_memory=max(all_bytes // 4, AT_A_TIME * length * bytes_per_token), packed_cache=0, show_progress=False,
    )  # fmt: skip
    with LLM(model, **settings) as without, LLM(model, **settings, kv_host_memory=2 * all_bytes) as with_store:
        engines = {"recomputation": without, "memory": with_store}
        rounds: dict[str, list[Round]] = {name: [] for name in engines}
        for number in range(-1, num_rounds):  # the first round is not counted
            tokens = {}
            for name in sorted(engines, reverse=bool(number % 2)):
                tokens[name], done = converse(
                    engines[name], num_conversations, num_turns, random.Random(f"round {number}")
                )
                if number >= 0:
                    rounds[name].append(done)
            if tokens["memory"] != tokens["recomputation"]:
                raise ValueError(f"round {number}: the tokens differ")
    seconds = {name: [each.seconds for each in done] for name, done in rounds.items()}
    return [
        {
            "engine": name,
            "conversations": num_conversations,
            "turns": num_turns,
            "tokens_per_second": num_conversations * num_turns * NEW_TOKENS / statistics.median(seconds[name]),
            "speed_up": ratio_of_medians(seconds["recomputation"], seconds[name]),
            "computed": statistics.median(each.computed for each in rounds[name]),
            "rounds": [asdict(each) for each in rounds[name]],
        }
        for name in engines
    ]


def converse(llm: LLM, num_conversations: int, num_turns: int, chance: random.Random) -> tuple[list[list[int]], Round]:
    """Serve all turns of all conversations. Return the tokens of each conversation, and the result."""

    def draw(num_tokens: int) -> list[int]:
        return [chance.randrange(llm.config.texts.vocab_size) for _ in range(num_tokens)]

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    conversations = [draw(FIRST_TOKENS) for _ in range(num_conversations)]
    computed_before = sum(stats.steps.num_tokens for stats in llm.core.replica_stats)
    num_tokens, started = 0, time.perf_counter()
    for _ in range(num_turns):
        for first in range(0, num_conversations, AT_A_TIME):
            group = conversations[first : first + AT_A_TIME]
            for tokens in group:
                tokens += draw(TURN_TOKENS)
            prompts = [{"prompt_token_ids": tokens.copy()} for tokens in group]
            for tokens, output in zip(group, llm.generate(prompts, params, use_tqdm=False), strict=True):
                tokens += output.outputs[0].token_ids
                num_tokens += len(tokens) - 1  # the last token is not computed
    seconds = time.perf_counter() - started
    computed = sum(stats.steps.num_tokens for stats in llm.core.replica_stats) - computed_before
    return conversations, Round(seconds, computed / num_tokens)


if __name__ == "__main__":
    main()
