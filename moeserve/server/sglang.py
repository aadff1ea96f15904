"""Routes for trainers that call SGLang's API, such as slime. They exist only with the setting `rl`."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, Request
from pydantic import Field

from moeserve.config.limits import LIMITS
from moeserve.controls import PauseMode
from moeserve.outputs import CompletionOutput, RequestOutput
from moeserve.sampling_params import SamplingParams
from moeserve.server.errors import ApiError
from moeserve.server.reply import Reply
from moeserve.server.rollouts import FolderPath, Version, finished
from moeserve.server.schema import Body, Bounded, Ignored, Refused, RequestBody, TokenId, finite
from moeserve.server.service import Service
from moeserve.server.whole_outputs import reply_with_whole

# SGLang's names of sampling parameters -> names in `SamplingParams`.
NAMES = {
    **{"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"},
    "no_stop_trim": "include_stop_str_in_output",
}
NO_EFFECT = ("spaces_between_special_tokens",)
PAUSE_MODES: dict[str, PauseMode] = {"abort": "abort", "in_place": "keep", "retract": "retract"}


class GenerateBody(RequestBody):
    input_ids: Annotated[list[TokenId], Bounded(LIMITS.max_token_ids, min_length=1)] | None = None
    text: Annotated[str, Field(max_length=LIMITS.max_text_length)] | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool = False
    return_routed_experts: bool = False
    logprob_start_len: Literal[-1] = -1  # log-probabilities of the output alone
    stream: Annotated[Any, Refused("the response comes at the end")] = None
    top_logprobs_num: Annotated[Any, Refused("use /inference/v1/generate with `logprobs`")] = None
    token_ids_logprob: Annotated[Any, Refused("use /inference/v1/generate with `logprobs`")] = None
    return_text_in_logprobs: Annotated[Any, Refused("`output_token_logprobs` has token ids")] = None
    return_hidden_states: Annotated[Any, Refused("hidden states are not kept")] = None
    input_embeds: Annotated[Any, Refused("send `input_ids` or `text`")] = None
    image_data: Annotated[Any, Refused("prompts are text")] = None
    video_data: Annotated[Any, Refused("prompts are text")] = None
    audio_data: Annotated[Any, Refused("prompts are text")] = None
    lora_path: Annotated[Any, Refused("there are no adapters")] = None
    custom_logit_processor: Annotated[Any, Refused("code of requests is never run")] = None
    session_params: Annotated[Any, Refused("send whole prompts; their prefixes are cached")] = None
    kv_transfer_params: Annotated[Any, Refused("no keys and values are transferred with `rl`")] = None
    rid: Annotated[Any, Ignored("the header `x-request-id` names a request")] = None
    log_metrics: Annotated[Any, Ignored("requests are always counted")] = None
    priority: Annotated[Any, Ignored("requests of all keys take turns")] = None


class PauseBody(Body):
    mode: Literal["abort", "in_place", "retract"] = "abort"


class FolderBody(RequestBody):
    model_path: FolderPath
    weight_version: Version | None = None
    load_format: Annotated[Any, Refused("the folder's safetensors are read", harmless=("auto", "safetensors"))] = None


class VersionBody(Body):
    new_version: Version


class AbortBody(Body):
    abort_all: Literal[True]  # this server does not know requests by id


def add_sglang_routes(app: FastAPI, service: Service, of_trainer: list[Any]) -> None:
    """Add the routes of SGLang's API.

    Args:
        of_trainer: dependencies of the routes, which refuse clients that are not trainers.
    """
    llm = service.llm

    _add_request_routes(app, service, of_trainer)

    @app.post("/pause_generation", dependencies=of_trainer)
    async def pause_generation(body: PauseBody | None = None) -> dict[str, Any]:
        mode = PAUSE_MODES["abort" if body is None else body.mode]
        await finished(llm.pause(mode, clear_cache=False))
        return _done("Generation paused")

    @app.post("/continue_generation", dependencies=of_trainer)
    async def continue_generation() -> dict[str, Any]:
        await finished(llm.resume())
        return _done("Generation continued")

    @app.api_route("/flush_cache", methods=["GET", "POST"], dependencies=of_trainer)
    async def flush_cache() -> dict[str, Any]:
        service.reset_prefix_cache()
        return _done("Cache flushed")

    @app.post("/update_weights_from_disk", dependencies=of_trainer)
    async def update_weights_from_disk(body: FolderBody) -> dict[str, Any]:
        service.begin(body)
        version = Path(body.model_path).name if body.weight_version is None else body.weight_version
        await finished(llm.update_weights_from_folder(body.model_path, version))
        return _done("Weights updated")

    @app.post("/abort_request", dependencies=of_trainer)
    async def abort_request(body: AbortBody) -> dict[str, Any]:
        await finished(llm.end_requests())
        return _done("Requests ended")

    @app.post("/update_weight_version", dependencies=of_trainer)
    async def update_weight_version(body: VersionBody) -> dict[str, Any]:
        """Name a new version of the weights. Prefixes computed with the old version are not found any more."""
        await finished(llm.update_weights_from_folder(None, body.new_version))
        return {"success": True, "new_version": body.new_version}

    @app.get("/get_weight_version", dependencies=of_trainer)
    async def get_weight_version() -> dict[str, str]:
        return {"weight_version": await llm.get_weight_version()}


def _add_request_routes(app: FastAPI, service: Service, of_trainer: list[Any]) -> None:
    @app.post("/generate", dependencies=of_trainer)
    async def generate(body: GenerateBody, request: Request) -> Reply:
        return _generated(service, body, request)

    @app.get("/health_generate", dependencies=of_trainer)
    async def health_generate() -> dict[str, str]:
        """Respond with status 503 unless requests are served."""
        if not service.is_ready:
            raise ApiError(503, "the engine does not serve requests")
        return {"status": "ready"}

    @app.get("/v1/loads", dependencies=of_trainer)
    async def loads() -> dict[str, Any]:
        """Return the numbers of running and waiting outputs. Both are 0 once `/abort_request` has ended all outputs."""
        totals = service.totals
        return {"loads": [{"num_running_reqs": totals.num_admitted, "num_waiting_reqs": totals.num_queued}]}


def _done(message: str) -> dict[str, Any]:
    return {"success": True, "message": message}


def _generated(service: Service, body: GenerateBody, request: Request) -> Reply:
    """Generate one output for a prompt, and respond with it in SGLang's form."""
    service.begin(body)
    prompt = body.text if body.input_ids is None else body.input_ids
    if prompt is None or (body.text is not None and body.input_ids is not None):
        raise ApiError(400, "give either input_ids or text", param="input_ids")
    if body.return_routed_experts and service.llm.config.experts.routes is None:
        raise ApiError(400, "serve with --enable-return-routed-experts", param="return_routed_experts")
    fields = body.sampling_params or {}
    given = {NAMES.get(name, name): value for name, value in fields.items() if name not in NO_EFFECT}
    params = SamplingParams.from_optional(**{"max_tokens": 128} | given | {"logprobs": 0})
    if params.n != 1:
        raise ApiError(400, f"n={params.n}: /generate has one output; send several requests", param="n")
    client = request.state.client

    def answer(output: RequestOutput) -> dict[str, Any]:
        (made,) = output.outputs
        meta = {"id": client.request_id, **_facts(output, made)}
        if body.return_logprob:
            pairs = zip(made.token_ids, made.logprobs or (), strict=True)
            meta["output_token_logprobs"] = [[finite(at[token].logprob), token, None] for token, at in pairs]
        if made.token_ids and body.return_routed_experts and made.routed_experts is not None:
            meta["routed_experts"] = base64.b64encode(made.routed_experts.astype(np.int32).tobytes()).decode()
        return {"text": made.text, "output_ids": made.token_ids, "meta_info": meta}

    return reply_with_whole(service.generate(client, prompt, params, None), answer)


def _facts(output: RequestOutput, made: CompletionOutput) -> dict[str, Any]:
    """Return the metadata of a finished output, in SGLang's form."""
    reason: dict[str, Any] = {"type": made.finish_reason}
    if made.finish_reason == "length":
        reason["length"] = len(made.token_ids)
    elif made.stop_reason is not None:
        reason["matched"] = made.stop_reason
    versions = made.weight_versions
    return {
        "finish_reason": reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(made.token_ids),
        "cached_tokens": output.num_cached_tokens,
        "weight_version": versions[-1].version if versions else None,
    }
