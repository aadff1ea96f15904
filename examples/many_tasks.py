"""Serve many asyncio tasks with one engine: `python examples/many_tasks.py [MODEL]`."""

import asyncio
import sys

from moeserve import AsyncLLM, RequestOutputKind, SamplingParams

questions = ["The capital of France is", "One, two, three, four,", "Monday, Tuesday,"]
params = SamplingParams(temperature=0, max_tokens=16, output_kind=RequestOutputKind.DELTA)


async def ask(llm: AsyncLLM, question: str) -> None:
    pieces = [output.outputs[0].text async for output in llm.generate(question, params)]
    print(f"{question!r} -> {''.join(pieces)!r} in {len(pieces)} pieces")


async def ask_all(llm: AsyncLLM) -> None:
    await asyncio.gather(*(ask(llm, question) for question in questions))


llm = AsyncLLM(sys.argv[1] if len(sys.argv) > 1 else None)
try:
    asyncio.run(ask_all(llm))
finally:
    llm.shutdown()
