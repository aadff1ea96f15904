"""Responses with complete outputs, for trainers' routes, which do not stream. A disconnected client ends generation."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable
from typing import Any

from moeserve.outputs import CompletionOutput, RequestOutput
from moeserve.server.reply import JSON, Reply, encode_json


def reply_with_whole(outputs: AsyncGenerator[RequestOutput, None], body: Callable[[RequestOutput], Any]) -> Reply:
    """Return a response that is sent once all outputs of a prompt are complete.

    Args:
        outputs: new parts of the outputs, as `Service.generate` yields them.
        body: converts the complete outputs to the response's body, as a value for JSON.
    """

    async def chunks() -> AsyncGenerator[bytes, None]:
        yield encode_json(body(await _whole(outputs)))

    return Reply(chunks(), JSON)


async def _whole(parts: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    """Return the last part, with the text, tokens and log-probabilities of all parts."""
    whole: dict[int, CompletionOutput] = {}
    prompt_logprobs = None
    async with contextlib.aclosing(parts):
        async for output in parts:
            prompt_logprobs = prompt_logprobs or output.prompt_logprobs
            for part in output.outputs:
                before = whole.get(part.index)
                text, token_ids = ("", []) if before is None else (before.text, before.token_ids)
                logprobs = [] if before is None or before.logprobs is None else before.logprobs
                token_ids += part.token_ids
                logprobs += part.logprobs or []
                whole[part.index] = dataclasses.replace(
                    part,
                    text=text + part.text,
                    token_ids=token_ids,
                    logprobs=None if part.logprobs is None and not logprobs else logprobs,
                )
    ordered = [whole[index] for index in sorted(whole)]
    return dataclasses.replace(output, outputs=ordered, prompt_logprobs=prompt_logprobs)
