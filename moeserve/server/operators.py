"""Endpoints for operators: `/ping`, `/load`, `/server_info`, and `/reset_prefix_cache` for administrators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import PlainTextResponse

from moeserve import __version__
from moeserve.config.engine_config import EngineConfig
from moeserve.server.errors import ApiError
from moeserve.server.keys import Keys
from moeserve.server.service import Service

# Settings of the engine that clients may see. None of them is a path or an address.
SHOWN_SETTINGS = (
    *("dtype", "quantization", "device", "max_model_len", "block_size", "has_float8_cache", "enable_prefix_caching"),
    *("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens", "max_queued_requests", "async_scheduling"),
    *("tensor_parallel_size", "data_parallel_size", "pipeline_layers", "expert_parallel", "dispatcher"),
    *("num_redundant_experts", "num_threads", "executor", "batch_invariant", "enforce_eager"),
)


def add_operator_routes(app: FastAPI, service: Service, of_administrator: list[Any]) -> None:
    """Add the routes for operators.

    Args:
        of_administrator: dependencies of `/reset_prefix_cache`, which refuse other clients.
    """

    @app.get("/ping", response_class=PlainTextResponse)
    @app.post("/ping", response_class=PlainTextResponse, include_in_schema=False)
    async def ping() -> str:
        """Respond with an empty body as long as the server's process is alive."""
        return ""

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of outputs that run or wait."""
        totals = service.totals
        return {"server_load": totals.num_admitted + totals.num_queued}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """Return the version, the names of the model, and settings of the engine."""
        settings, config = service.llm.config.settings(), service.llm.config
        model = {"dtype": config.weights.dtype, "logprobs_mode": config.texts.logprobs_mode}
        transfer = {"backend": "shm"} if config.weights.rl else None
        return {
            "vllm_config": {"model_config": model, "weight_transfer_config": transfer},  # fields that TRL reads
            **_sglang_settings(config),
            "version": __version__,
            "model_names": service.model_names,
            "num_blocks": service.llm.session.engine.num_blocks,
            "config": {name: settings[name] for name in SHOWN_SETTINGS},
        }

    @app.post("/reset_prefix_cache", dependencies=of_administrator)
    async def reset_prefix_cache() -> dict[str, bool]:
        """Reset the prefix cache, so that later requests find no prefix of earlier requests."""
        service.reset_prefix_cache()
        return {"success": True}


def _sglang_settings(config: EngineConfig) -> dict[str, Any]:
    """Return engine settings under SGLang's names. slime requires some of them to equal its own settings."""
    return {
        "tp_size": config.parallel.tensor_parallel_size,
        "pp_size": config.parallel.pipeline_parallel_size,
        "dp_size": config.parallel.data_parallel_size,
        "dtype": config.weights.dtype,
        "enable_memory_saver": False,
        "enable_return_routed_experts": config.experts.routes is not None,
    }


def for_administrators(keys: Keys) -> list[Any]:
    """Return the dependencies of routes that need an administrator's key."""

    def require_key(request: Request) -> None:
        require_administrator(keys, request.headers)

    return [Depends(require_key)]


def for_programs() -> list[Any]:
    """Return the dependencies of routes that need no key, but that no web page may reach.

    A page can send requests to servers that only the machine of its visitor reaches. Browsers add at least one of the
    two headers to such requests; trainers send neither.
    """

    def refuse_web_pages(request: Request) -> None:
        if "origin" in request.headers or request.headers.get("sec-fetch-site", "none") != "none":
            raise ApiError(403, "web pages may not use the routes for trainers", code="web_page_refused")

    return [Depends(refuse_web_pages)]


def require_administrator(keys: Keys, headers: Mapping[str, str]) -> None:
    """Raise ApiError unless the request has the key of an administrator."""
    if not keys.have_administrator:
        message = "this needs an administrator's key, and there is none: serve with --admin-key"
        raise ApiError(403, message, code="no_administrator")
    if not keys.is_administrator(headers):
        raise ApiError(403, "this needs the key of an administrator", code="administrator_required")
