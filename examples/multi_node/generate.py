"""Ask a model two questions, on the nodes of a Ray cluster.

Run it under `moeserve launch`, as a Ray job, or on a node of a running cluster. Without a cluster, it starts one on
this host alone.

    moeserve launch --head 10.0.0.1 --nodes 2 -- python examples/multi_node/generate.py --data-parallel-size 2
"""

import argparse

from moeserve import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="folder of a checkpoint, the same on every node (none: the default model)")
parser.add_argument("--tensor-parallel-size", type=int, default=1)
parser.add_argument("--data-parallel-size", type=int, default=2)
parser.add_argument("--max-tokens", type=int, default=24)
options = parser.parse_args()

questions = ["What is the capital of England?", "What is the capital of Germany?"]

# Ranks are actors of Ray. They do not run this script, so it needs no main guard.
with LLM(
    options.model,
    executor="ray",
    tensor_parallel_size=options.tensor_parallel_size,
    data_parallel_size=options.data_parallel_size,
) as llm:
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    answers = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
    for question, answer in zip(questions, answers, strict=True):
        print(question, "->", answer.outputs[0].text)
