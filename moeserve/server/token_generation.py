"""vLLM's route `/inference/v1/generate`: tokens in and out, for trainers such as prime-rl. Exists only with `rl`."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, Request
from pydantic import BaseModel, Field

from moeserve.config.limits import LIMITS
from moeserve.outputs import CompletionOutput, Logprob, RequestOutput
from moeserve.sampling_params import SamplingParams
from moeserve.server.reply import Reply
from moeserve.server.schema import Bounded, TokenId, by_position, finite, usage
from moeserve.server.service import Service
from moeserve.server.whole_outputs import reply_with_whole

# prime-rl sends these among the sampling parameters. Token ids are always returned.
OTHER_FIELDS = ("cache_salt", "return_token_ids")


class TokensBody(BaseModel):
    token_ids: Annotated[list[TokenId], Bounded(LIMITS.max_token_ids, min_length=1)]
    model: str | None = None
    sampling_params: dict[str, Any] = {}
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    stream: Literal[False] = False
    features: None = None  # of images


def add_token_generation_route(app: FastAPI, service: Service, of_trainer: list[Any]) -> None:
    """Add the route, which takes the token ids of a prompt and returns generated token ids.

    Args:
        of_trainer: dependencies of the route, which refuse clients that are not trainers.
    """

    @app.post("/inference/v1/generate", dependencies=of_trainer)
    async def generate_tokens(body: TokensBody, request: Request) -> Reply:
        service.require_model(body.model)
        given = {name: value for name, value in body.sampling_params.items() if name not in OTHER_FIELDS}
        salt = body.cache_salt or body.sampling_params.get("cache_salt")
        params = SamplingParams.from_optional(**{"max_tokens": None} | given)
        outputs = service.generate(request.state.client, body.token_ids, params, salt)
        start = params.routed_experts_prompt_start or 0

        def answer(output: RequestOutput) -> dict[str, Any]:
            num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
            num_output = sum(len(each.token_ids) for each in output.outputs)
            return {
                "request_id": request.state.client.request_id,
                "choices": [_choice(each, start) for each in output.outputs],
                "prompt_logprobs": None if output.prompt_logprobs is None else by_position(output.prompt_logprobs),
                "usage": usage(num_prompt, num_cached, service.num_written(num_prompt, num_cached), num_output),
            }

        return reply_with_whole(outputs, answer)


def _choice(output: CompletionOutput, start: int) -> dict[str, Any]:
    logprobs = routed_experts = None
    if output.token_ids and output.routed_experts is not None:  # before the first token, rows of the prompt may lack
        routed_experts = _packed(output.routed_experts, start)
    if output.logprobs is not None:
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        logprobs = {"content": [_position(token_id, position) for token_id, position in pairs]}
    return {
        "index": output.index,
        "token_ids": output.token_ids,
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "routed_experts": routed_experts,
        "weight_versions": [(span.version, span.start, span.stop) for span in output.weight_versions],
    }


def _position(token_id: int, position: dict[int, Logprob]) -> dict[str, Any]:
    """Return the log-probabilities of a token and of the most likely tokens at its position."""
    most_likely = [{"token": f"token_id:{other}", "logprob": finite(at.logprob)} for other, at in position.items()]
    return {
        "token": f"token_id:{token_id}",
        "logprob": finite(position[token_id].logprob),
        "top_logprobs": most_likely,
    }


def _packed(experts_TLK: npt.NDArray[np.integer[Any]], start: int) -> dict[str, Any]:
    """Return routed experts in the form that prime-rl reads."""
    return {
        "data": base64.b64encode(np.ascontiguousarray(experts_TLK).tobytes()).decode(),
        "shape": list(experts_TLK.shape),
        "start": start,
        "dtype": experts_TLK.dtype.name,
    }
