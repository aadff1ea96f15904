"""A program with planted mistakes, each of which `mypy --strict` must refuse with the named code. It is never run."""

import moeserve
from moeserve import LLM, AsyncLLM, SamplingParams

llm = LLM(modle="folder")  # refused: call-arg
llm = LLM(3)  # refused: arg-type
llm = LLM(tensor_parallel_size="2")  # refused: arg-type
llm = LLM(dtype="int7")  # refused: arg-type
llm = LLM(speculative_config="ngram")  # refused: arg-type
llm = LLM(pipeline_layers=3)  # refused: arg-type
llm = LLM(enable_prefix_caching="yes")  # refused: arg-type
llm = LLM(enable_chunked_prefil=True)  # refused: call-arg
llm = LLM(distributed_executor_backend="slurm")  # refused: arg-type
served = AsyncLLM(kv_cache_memory=1.5)  # refused: arg-type
served = AsyncLLM(max_num_seq=3)  # refused: call-arg
params = SamplingParams(temprature=0)  # refused: call-arg
params = SamplingParams(1)  # refused: call-arg
params = SamplingParams(max_tokens="9")  # refused: arg-type
params = SamplingParams(stop=3)  # refused: arg-type
params.temperature = "hot"  # refused: assignment
llm.generate(3)  # refused: arg-type
llm.generate("x", [3])  # refused: list-item
llm.generat("x")  # refused: attr-defined
llm.chat("x")  # refused: arg-type
print(llm.generate("x")[0].text)  # refused: attr-defined
print(llm.generate("x")[0].outputs[0].txt)  # refused: attr-defined
print(served.generate("x")[0])  # refused: index
print(moeserve.LMM)  # refused: attr-defined
