"""Run six ranks, two replicas of three ranks with experts spread over all: `python examples/parallel.py`."""

from moeserve import LLM, SamplingParams

question = [{"role": "user", "content": "What is the capital of England?"}]

# The default model has 9 attention heads, 3 for each rank of a replica. Every rank is a separate process that does not
# run this script, so no main guard is needed. All layouts of 1 or 3 TP ranks give the
# same tokens, to the last bit of their log-probabilities (docs/parallelism.md).
with LLM(tensor_parallel_size=3, data_parallel_size=2, dtype="float32") as llm:
    (answer,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=32))
    print(answer.outputs[0].text)

    tp, dp = llm.config.parallel.tensor_parallel_size, llm.config.parallel.data_parallel_size
    print(f"tp {tp} x dp {dp} = {llm.config.parallel.num_ranks} ranks, dispatcher {llm.config.experts.dispatcher}")
