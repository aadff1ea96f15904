"""One start of moeserve, from nothing to the first token: what `startup.py` runs for each sample.

Prints three readings of the system's monotonic clock, which all processes share: when the imports were done, when the
model was loaded, and when the first token was there. Ends when the packed copy is written.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence

from moeserve import LLM, SamplingParams
from moeserve.models.packed_cache_writer import wait_for_cache_writers

PROMPT_TOKENS = 32


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m moeserve.bench.first_token", description="One start.")
    parser.add_argument("model")
    parser.add_argument("--no-packed-cache", action="store_true")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(arguments)
    imported = time.monotonic()
    with LLM(
        options.model,
        packed_cache=0 if options.no_packed_cache else "16GiB",
        quantization=options.quantization,
        num_threads=options.threads,
        max_model_len=1024,
        device="cpu",
        show_progress=False,
    ) as llm:
        loaded = time.monotonic()
        prompt = random.Random(0).choices(range(llm.config.vocab_size), k=PROMPT_TOKENS)
        llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        print(json.dumps({"imported": imported, "loaded": loaded, "first_token": time.monotonic()}), flush=True)
        wait_for_cache_writers()  # the end of a run gives up what is not written yet


if __name__ == "__main__":
    main()
