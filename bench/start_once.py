"""Starts moeserve once, in a separate process, and prints the time when each part was done. Run by `startup.py`."""

from __future__ import annotations

import json
import random
import sys
import time

PROMPT_TOKENS = 32


def main(settings: str) -> None:
    """Generate one token, and print readings of the monotonic clock, which all processes share."""
    import torch  # noqa: F401

    clock = {"torch": time.monotonic()}
    from moeserve import LLM, SamplingParams

    clock["imported"] = time.monotonic()
    with LLM(max_model_len=1024, device="cpu", show_progress=False, **json.loads(settings)) as llm:
        clock["loaded"] = time.monotonic()
        prompt = random.Random(0).choices(range(llm.config.texts.vocab_size), k=PROMPT_TOKENS)
        llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        print(json.dumps(clock | {"first_token": time.monotonic()}), flush=True)
        from moeserve.models.checkpoint.packed_cache_writer import wait_for_cache_writers

        wait_for_cache_writers()  # else the process could exit before the packed copy is written


if __name__ == "__main__":
    main(sys.argv[1])
