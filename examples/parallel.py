"""Run six ranks, two replicas of three ranks with experts spread over all: `python examples/parallel.py`."""

from moeserve import LLM, SamplingParams

question = [{"role": "user", "content": "What is the capital of England?"}]

# The default model has 9 attention heads, 3 for each rank of a replica. Every rank is a separate process that does not
# run this script, so no main guard is needed. In float32 all layouts give the same tokens; in bfloat16 the order of
# sums over ranks can change the choice between two equally likely tokens.
with LLM(tensor_parallel_size=3, data_parallel_size=2, dtype="float32") as llm:
    (answer,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=32))
    print(answer.outputs[0].text)

    tp, dp = llm.config.tensor_parallel_size, llm.config.data_parallel_size
    print(f"tp {tp} x dp {dp} = {llm.config.num_ranks} ranks, dispatcher {llm.config.dispatcher}")
