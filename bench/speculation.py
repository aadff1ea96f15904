"""Speculative decoding with n-grams, and decoding without speculation, one request at a time.

    python -m moeserve.bench.speculation [--model default] [--model qwen3-mini] [--drafts 4] [--rounds 5] [--json PATH]

- *default*: the default model, which is small and trained, is asked for the main sentences of a text, so that its
  answer repeats parts of the prompt.
- Synthetic models have random weights and get random tokens. Their greedy output soon repeats itself, so nearly all
  draft tokens are accepted. This gives an upper bound for models of their shapes.

The rate is that of new tokens, without the prompt's part, as in `decode.py`. *steps* is the number of steps relative to
decoding without speculation. Configurations are measured alternately. Speed-ups are medians over the rounds, of the
rates and of the processor time per token; other programs on the machine affect the latter less.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from moeserve import LLM, SamplingParams
from moeserve.api.default_model import default_model
from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.harness import Row, add_models, at_least, interleave, make_parser
from moeserve.bench.report import show_and_save

MODELS = ("default", "qwen3-mini")
NUM_DRAFTS = (2, 4, 6)
PROMPT_TOKENS = 128
TEXT = """The harbour of the old town was built in 1642, after a great fire had destroyed the wooden quay. For two
hundred years it was the largest port of the coast, and ships from eleven countries unloaded spices, timber and wool
there. In 1871 the railway reached the neighbouring city, whose deeper harbour could take steam ships, and trade moved
away within a decade. Today the warehouses are museums and restaurants, and the quay belongs to fishing boats and to
visitors, who come for the market on Saturdays."""
QUESTION = "Summarise this text with its most important sentences, word by word:\n\n" + " ".join(TEXT.split())


class Sample(NamedTuple):
    """One measurement, which excludes the prompt and the first token."""

    rate: float  # new tokens per second
    processor_s: float  # processor time of all threads
    token_ids: list[int]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("speculation", "Decoding with and without speculation.", rounds=5)
    add_models(parser, MODELS)
    parser.add_argument(
        "--drafts", type=at_least(1), action="append", help=f"draft tokens, repeatable (default: {NUM_DRAFTS})"
    )
    parser.add_argument("--new-tokens", type=at_least(2), default=97, help="new tokens of the request")
    options = parser.parse_args(arguments)
    for model in options.model or MODELS:
        with ExitStack() as stack:
            rows = measure_model(
                stack, model, options.drafts or NUM_DRAFTS, options.new_tokens, options.rounds, options.threads
            )
        show_and_save(options.json, [row | {"benchmark": "speculation", "model": Path(model).name} for row in rows])


def measure_model(
    stack: ExitStack, model: str, num_drafts: Sequence[int], new_tokens: int, num_rounds: int, num_threads: int
) -> list[Row]:
    folder = default_model() if model == "default" else find_checkpoint(model)
    configs = {"no speculation": None} | {
        f"{number} draft tokens": {"method": "ngram", "num_speculative_tokens": number} for number in num_drafts
    }
    settings: dict[str, Any] = {"num_threads": num_threads, "max_model_len": 512, "enable_prefix_caching": False}
    llms = {
        way: stack.enter_context(LLM(folder, speculative_config=config, **settings)) for way, config in configs.items()
    }
    prompt = prompt_for(model, llms["no speculation"])
    rounds = interleave(
        {way: functools.partial(timed_decode, llm, prompt, new_tokens) for way, llm in llms.items()},
        num_rounds,
        warms_up=True,
    )
    base = rounds["no speculation"]
    outputs = {tuple(sample.token_ids) for samples in rounds.values() for sample in samples}
    assert len(outputs) == 1, "speculation has changed the output"
    rows: list[Row] = []
    for way, samples in rounds.items():
        stats = llms[way].session.engine.replica_stats[0]
        num_drafted, num_accepted = stats.speculation.num_draft_tokens, stats.speculation.num_accepted_tokens
        rows.append(
            {
                "way": way,
                "rate": statistics.median(sample.rate for sample in samples),
                "ratio": statistics.median(own.rate / other.rate for own, other in zip(samples, base, strict=True)),
                "processor_ratio": statistics.median(
                    other.processor_s / own.processor_s for own, other in zip(samples, base, strict=True)
                ),
                "accepted": num_accepted / num_drafted if num_drafted else None,
                "steps": 1 - num_accepted / ((num_rounds + 1) * (new_tokens - 1)),
                "rounds": [[sample.rate, sample.processor_s] for sample in samples],
            }
        )
    return rows


def prompt_for(model: str, llm: LLM) -> list[int]:
    """Return the question in the model's chat format, or random tokens."""
    if model != "default":
        return random.Random(1).choices(range(llm.config.texts.vocab_size), k=PROMPT_TOKENS)
    messages = [{"role": "user", "content": QUESTION}]
    prompt: list[int] = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return prompt


def timed_decode(llm: LLM, prompt: list[int], new_tokens: int) -> Sample:
    """Decode greedily, once completely and once up to the first token, whose time is subtracted."""

    def run(num_tokens: int) -> tuple[float, float, list[int]]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        start, start_of_processor = time.perf_counter(), time.process_time()
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        processor_s = time.process_time() - start_of_processor
        return time.perf_counter() - start, processor_s, output.outputs[0].token_ids

    (first_s, first_processor_s, _), (whole_s, processor_s, token_ids) = run(1), run(new_tokens)
    return Sample((new_tokens - 1) / (whole_s - first_s), processor_s - first_processor_s, token_ids)


if __name__ == "__main__":
    main()
