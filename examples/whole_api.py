"""Use all parts of the Python API once: `python examples/whole_api.py`. `mypy --strict` accepts this program."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import torch

import moeserve
from moeserve import LLM, AsyncLLM, CompletionOutput, Logprob, RequestOutput, RequestOutputKind, SamplingParams
from moeserve import StructuredOutputsParams as Structured

QUESTION = [{"role": "user", "content": "What is the capital of England?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=1, stop=["\n\n"])


def best(output: RequestOutput) -> tuple[str, float]:
    """Return the text of the first output, and the log-probability of its first token."""
    first: CompletionOutput = output.outputs[0]
    assert first.logprobs is not None
    chosen: Logprob = first.logprobs[0][first.token_ids[0]]
    return first.text, chosen.logprob


def complete(llm: LLM, folder: Path) -> None:
    print(best(llm.generate("The capital of France is", GREEDY)[0]))
    several = llm.generate(["One, two,", "Monday, Tuesday,"], [GREEDY, SamplingParams(n=2)], use_tqdm=False)
    several += llm.generate([[504, 3575], [28]], GREEDY) + llm.generate({"prompt": "One,", "cache_salt": "a"})
    print([(len(output.prompt_token_ids), output.outputs[0].finish_reason) for output in several])
    print(llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].text)
    prompt = llm.chat_prompt(QUESTION, add_generation_prompt=True)
    pieces = [each.outputs[0].text for each in llm.stream(prompt, SamplingParams(output_kind=RequestOutputKind.DELTA))]
    print(len("".join(pieces)) > 0, llm.has_chat_template)
    choice = SamplingParams(max_tokens=4, structured_outputs=Structured(choice=["yes", "no"]))
    print(llm.generate("Is water wet?", choice, use_tqdm=False)[0].outputs[0].text in ("yes", "no"))
    print(llm.config.weights.dtype, llm.config.schedule.max_model_len, sum(llm.expert_load().tokens_of_expert[0]) > 0)
    llm.save_placement(folder / "placement.json")
    try:
        llm.generate([10**6], GREEDY)
    except moeserve.RequestError as error:
        print(f"refused: {error.parameter}")


async def ask(llm: AsyncLLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens = 4
    async for output in llm.generate("Tuesday,", params, request_id="mine"):
        print(output.request_id, output.finished)
    await llm.check_health()
    print(llm.is_running, llm.errored)


with (
    tempfile.TemporaryDirectory() as name,
    LLM(dtype=torch.bfloat16, max_model_len=512, kv_cache_memory="64MiB") as llm,
):
    complete(llm, Path(name))
served = AsyncLLM(max_model_len=512, enable_prefix_caching=False, show_progress=False, trust_remote_code=False)
try:
    asyncio.run(ask(served))
finally:
    served.shutdown()
try:
    SamplingParams(top_p=2.0)
except moeserve.MoeserveError as error:
    print(f"{type(error).__name__}: {error}")
