"""Decoding with part of the experts in memory: tokens per second, and what is read from disk.

Clients decode random prompts at temperature 1, in one batch. A new start for each share of the experts' memory.

- *found*: the share of needed experts that were in memory. *MB/token*: read from disk for each token.
- *GB/s*: bytes read over the whole time; *waiting*: the share of it in which ranks waited for experts.
- *policies*: reads by other policies of replacement, on the same visits, over those of Belady's optimum, which knows
  the future (`expert_policies.py`). The store has the one named frequent_64.
"""

from __future__ import annotations

import gc
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from moeserve import LLM, SamplingParams
from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.expert_policies import POLICIES, count_reads, fewest_reads
from moeserve.bench.harness import Row, at_least, make_parser
from moeserve.bench.plots import Curves, save_curves
from moeserve.bench.report import show_and_save
from moeserve.ops.products.cpu import CpuExpertStore

PROMPT_TOKENS = 16
WARM_UP_TOKENS = 48  # the engine measures in them how many clients should decode at once


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("expert_memory", __doc__, rounds=1, threads=False)
    parser.add_argument("--model", default="qwen3-mini", help="name or folder of a checkpoint")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.35, 0.25, 0.15], help="of the experts")
    parser.add_argument("--clients", type=at_least(1), nargs="+", default=[1, 8, 32], help="requests at once")
    parser.add_argument("--new-tokens", type=at_least(1), default=64, help="tokens of each request")
    parser.add_argument("--quantization", help="number format of the weights")
    parser.add_argument("--expert-store", help="folder on the disk to measure")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a chart as SVG; needs moeserve[viz]")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    model = str(find_checkpoint(options.model))
    for share in options.shares * options.rounds:
        on_disk = {} if share >= 1 else dict(expert_memory=f"{share:%}", expert_store=options.expert_store)
        with LLM(
            model, packed_cache=0, kv_cache_memory="512MiB", enable_prefix_caching=False, show_progress=False,
            max_model_len=PROMPT_TOKENS + max(options.new_tokens, WARM_UP_TOKENS) + 1,
            quantization=options.quantization, **on_disk,
        ) as llm:  # fmt: skip
            stores = [found for found in gc.get_objects() if isinstance(found, CpuExpertStore)]
            for num_clients in options.clients:
                row = measure(llm, stores[0] if on_disk else None, num_clients, options.new_tokens)
                facts = {"benchmark": "expert_memory", "model": options.model, "share": share, "clients": num_clients}
                rows.append(facts | {"quantization": options.quantization or "none"} | row)
                show_and_save(options.json, rows[-1:])
            del stores
    if options.plot:
        panels = [("tokens/s", "tokens/s, all clients together"), ("MB/token", "MB read for a token")]
        save_curves(options.plot, [_curves(rows, *panel) for panel in panels], "experts in memory, %")


def _curves(rows: Sequence[Row], column: str, title: str) -> Curves:
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["clients"], row["share"])):
        points[f"{row['clients']} client" + "s" * (row["clients"] > 1)].append(
            (100 * float(row["share"]), float(row.get(column, 0.0)))
        )
    return Curves(title, points)


def measure(llm: LLM, store: CpuExpertStore | None, num_clients: int, num_tokens: int) -> Row:
    """Decode with some clients, and return the row of a table."""
    generator, vocab_size = random.Random(num_clients), llm.config.texts.vocab_size
    prompts = [
        {"prompt_token_ids": [generator.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]}
        for _ in range(num_clients)
    ]
    params = SamplingParams(temperature=1, max_tokens=WARM_UP_TOKENS, ignore_eos=True, seed=0)
    llm.generate(prompts, params)
    if store is not None:
        before = store.totals()
        store.record(is_on=True)
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=1, max_tokens=num_tokens, ignore_eos=True, seed=1))
    seconds = time.perf_counter() - start
    all_tokens = num_clients * num_tokens
    row: Row = {"tokens/s": all_tokens / seconds}
    if store is None:
        return row
    found, read, num_bytes, wait_ns, _ = (now - then for now, then in zip(store.totals(), before, strict=True))
    row |= {
        "found": found / (found + read),
        "MB/token": num_bytes / all_tokens / 1e6,
        "GB/s": num_bytes / seconds / 1e9,
        "waiting": wait_ns / 1e9 / seconds,
    }
    return row | policies(store.record(is_on=False), store.num_slots)


def policies(recorded: list[tuple[int, list[int]]], num_slots: Sequence[int]) -> Row:
    """Return the reads of each policy over those of the optimum, all layers together."""
    visits_of_layer: dict[int, list[list[int]]] = defaultdict(list)
    for layer, experts in recorded:
        visits_of_layer[layer].append(experts)
    fewest = sum(fewest_reads(visits, num_slots[layer]) for layer, visits in visits_of_layer.items())
    return {
        name: sum(count_reads(visits, num_slots[layer], policy(visits)) for layer, visits in visits_of_layer.items())
        / max(1, fewest)
        for name, policy in POLICIES.items()
    }
