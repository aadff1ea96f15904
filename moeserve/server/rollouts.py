"""Routes for trainers of the served model, with the names and payloads of vLLM. They exist only with `rl`."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Depends, FastAPI, Query, Request

from moeserve.controls import PauseMode
from moeserve.errors import MoeserveError
from moeserve.server.errors import ApiError, api_error
from moeserve.server.keys import Keys
from moeserve.server.operators import require_administrator
from moeserve.server.service import Service


def add_rollout_routes(app: FastAPI, service: Service, keys: Keys) -> None:
    """Add the routes of this file, for administrators."""

    def require_key(request: Request) -> None:
        require_administrator(keys, request.headers)

    of_administrator = [Depends(require_key)]

    @app.post("/pause", dependencies=of_administrator)
    async def pause(
        mode: Annotated[PauseMode, Query()] = "abort", clear_cache: Annotated[bool, Query()] = True
    ) -> dict[str, Literal["paused"]]:
        """Respond once no rank computes; see `LLM.pause`."""
        try:
            await service.llm.pause(mode, clear_cache)
        except MoeserveError as error:
            raise control_error(error) from error
        return {"status": "paused"}

    @app.post("/resume", dependencies=of_administrator)
    async def resume() -> dict[str, Literal["resumed"]]:
        """Run steps again after a pause."""
        try:
            await service.llm.resume()
        except MoeserveError as error:
            raise control_error(error) from error
        return {"status": "resumed"}

    @app.get("/is_paused", dependencies=of_administrator)
    async def is_paused() -> dict[str, bool]:
        """Return True from the end of a pause to the end of a resume."""
        return {"is_paused": await service.llm.is_paused()}


def control_error(error: MoeserveError) -> ApiError:
    """Return the error for a control that the engine refused or could not finish."""
    return api_error(error)
