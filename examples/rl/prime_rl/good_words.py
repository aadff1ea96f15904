"""An environment for prime-rl: tasks of two words, a reward for words of a kind, and a harness that asks once."""

import itertools

import verifiers.v1 as vf
from openai import AsyncOpenAI

NUM_GOOD = 6


class WordsTask(vf.Task[vf.TaskData]):
    """A prompt of two words. The reward is the share of w0 to w5 among the words of the answer."""

    @vf.reward(weight=1.0)
    async def share_of_good(self, trace: vf.Trace) -> float:
        words = [word for word in (trace.last_reply or "").split() if word.startswith("w")]
        return sum(int(word[1:]) < NUM_GOOD for word in words) / max(1, len(words))


class WordsTaskset(vf.Taskset[WordsTask, vf.TasksetConfig]):
    def load(self) -> list[WordsTask]:
        pairs = itertools.product(range(8), repeat=2)
        return [
            WordsTask(vf.TaskData(idx=index, prompt=f"w{first} w{second}"), self.config.task)
            for index, (first, second) in enumerate(pairs)
        ]


class OneAnswerConfig(vf.HarnessConfig):
    pass


class OneAnswer(vf.Harness[OneAnswerConfig]):
    """Sends one request, from the environment's own process."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(
                model=ctx.model, messages=[{"role": "user", "content": str(data.prompt)}]
            )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["OneAnswer", "WordsTaskset"]
