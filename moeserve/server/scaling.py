"""`POST /scale`: lets operators change the number of replicas. The route exists only with `allow_scale`."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from moeserve.errors import ScaleError, ScalingInProgressError
from moeserve.server.errors import ApiError
from moeserve.server.keys import Keys
from moeserve.server.operators import require_administrator
from moeserve.server.service import Service

logger = logging.getLogger(__name__)


class ScaleRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    data_parallel_size: Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]


class ScaleAnswer(BaseModel):
    data_parallel_size: int


def add_scale_route(app: FastAPI, service: Service, keys: Keys) -> None:
    """Add the route. If there are administrators' keys, only administrators may use it, otherwise all clients."""

    @app.post("/scale")
    async def scale(body: ScaleRequest, request: Request) -> ScaleAnswer:
        """Respond once the requested number of replicas serves requests."""
        if keys.have_administrator:
            require_administrator(keys, request.headers)
        service.admission.require_open()
        try:
            await service.llm.scale(body.data_parallel_size)
        except ScalingInProgressError as error:
            raise ApiError(409, str(error), code="scaling_in_progress", headers={"Retry-After": "10"}) from error
        except ScaleError as error:
            logger.error("%s", error)
            message = "the number of replicas was not changed; the server's log says why"
            raise ApiError(503, message, code="scaling_failed") from error
        return ScaleAnswer(data_parallel_size=body.data_parallel_size)
