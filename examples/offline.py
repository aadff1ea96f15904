"""Complete several prompts at once: `python examples/offline.py [MODEL]`."""

import sys

from moeserve import LLM, SamplingParams

prompts = ["The capital of France is", "One, two, three, four,", "Monday, Tuesday,"]

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
