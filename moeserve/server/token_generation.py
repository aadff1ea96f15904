"""vLLM's route `/inference/v1/generate`: tokens in and out, for trainers such as prime-rl. Exists only with `rl`."""

from __future__ import annotations

import base64
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, Request
from pydantic import ConfigDict

from moeserve.config.limits import LIMITS
from moeserve.outputs import CompletionOutput, Logprob, RequestOutput
from moeserve.sampling_params import SamplingParams
from moeserve.server.reply import Reply
from moeserve.server.schema import (
    Body,
    Bounded,
    CacheSalt,
    Ignored,
    Refused,
    RequestBody,
    TokenId,
    by_position,
    finite,
    usage,
    version_triples,
)
from moeserve.server.service import Service
from moeserve.server.whole_outputs import reply_with_whole


class TokenParams(Body):
    """Sampling parameters, and fields that prime-rl sends among them. `SamplingParams` validates the others."""

    model_config = ConfigDict(extra="allow")

    cache_salt: CacheSalt | None = None
    return_token_ids: Annotated[Any, Ignored("token ids are always returned")] = None


class TokensBody(RequestBody):
    token_ids: Annotated[list[TokenId], Bounded(LIMITS.max_token_ids, min_length=1)]
    sampling_params: TokenParams = TokenParams()
    cache_salt: CacheSalt | None = None
    stream: Annotated[Any, Refused("the response comes at the end")] = None
    features: Annotated[Any, Refused("prompts are token ids of text")] = None
    content_parts: Annotated[Any, Refused("prompts are token ids of text")] = None
    kv_transfer_params: Annotated[Any, Refused("no keys and values are transferred with `rl`")] = None
    return_token_ids: Annotated[Any, Ignored("token ids are always returned")] = None
    request_id: Annotated[Any, Ignored("the header `x-request-id` names a request")] = None
    priority: Annotated[Any, Ignored("requests of all keys take turns")] = None


def add_token_generation_route(app: FastAPI, service: Service, of_trainer: list[Any]) -> None:
    """Add the route, which takes the token ids of a prompt and returns generated token ids.

    Args:
        of_trainer: dependencies of the route, which refuse clients that are not trainers.
    """

    @app.post("/inference/v1/generate", dependencies=of_trainer)
    async def generate_tokens(body: TokensBody, request: Request) -> Reply:
        service.begin(body)
        salt = body.cache_salt or body.sampling_params.cache_salt
        params = SamplingParams.from_optional(**{"max_tokens": None} | (body.sampling_params.model_extra or {}))
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
    if output.token_ids and output.routed_experts is not None:  # before the first token, rows may be missing
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
        "weight_versions": version_triples(output),
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
