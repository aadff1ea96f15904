"""Routes for trainers of the served model, with vLLM's names and payloads. They exist only with the setting `rl`."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict, Field

from moeserve.api.rollouts import MAX_SIZE
from moeserve.controls import MemoryTag, PauseMode
from moeserve.errors import MoeserveError, WeightUpdateError
from moeserve.server.errors import ApiError, api_error
from moeserve.server.service import Service

Result = TypeVar("Result")
Shapes = dict[str, list[Annotated[int, Field(strict=True, ge=0, le=MAX_SIZE)]]]
Version = Annotated[str, Field(min_length=1, max_length=256)]
FolderPath = Annotated[str, Field(min_length=1, max_length=4096)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")  # refuses unknown fields by name, such as vLLM's with pickled objects


class InitBody(_Body):
    init_info: dict[str, Any]


class StartBody(_Body):
    shapes: Shapes | None = None


class UpdateBody(_Body):
    update_info: dict[str, Any] | None = None
    weight_dir: FolderPath | None = None  # prime-rl's field: a whole update from a folder


class FinishBody(_Body):
    weight_version: Version | None = None


class AbortRequestsBody(_Body):
    request_ids: list[str] = []  # empty: all requests


class CheckBody(_Body):
    action: Literal["checksum", "compare"]
    baseline: dict[str, str] | None = None


def add_rollout_routes(app: FastAPI, service: Service, of_trainer: list[Any]) -> None:
    """Add the routes for trainers, with vLLM's names.

    Args:
        of_trainer: dependencies of the routes, which refuse clients that are not trainers.
    """

    @app.post("/pause", dependencies=of_trainer)
    async def pause(
        mode: Annotated[PauseMode, Query()] = "abort", clear_cache: Annotated[bool, Query()] = True
    ) -> dict[str, Literal["paused"]]:
        """Respond once no rank computes any more; see `LLM.pause`."""
        await finished(service.llm.pause(mode, clear_cache))
        return {"status": "paused"}

    @app.post("/resume", dependencies=of_trainer)
    async def resume() -> dict[str, Literal["resumed"]]:
        """Continue to run steps after a pause."""
        await finished(service.llm.resume())
        return {"status": "resumed"}

    @app.post("/abort_requests", dependencies=of_trainer)
    async def abort_requests(body: AbortRequestsBody) -> dict[str, str]:
        """End all requests. Their outputs keep the tokens generated so far."""
        if body.request_ids:
            raise ApiError(400, "request_ids: single requests cannot be ended here; send {} to end all")
        await finished(service.llm.end_requests())
        return {"status": "aborted"}

    @app.get("/is_paused", dependencies=of_trainer)
    async def is_paused() -> dict[str, bool]:
        """Return True from the end of a pause to the end of a resume."""
        return {"is_paused": await service.llm.is_paused()}

    @app.post("/sleep", dependencies=of_trainer)
    async def sleep(
        level: Annotated[int, Query()] = 1, mode: Annotated[PauseMode, Query()] = "abort"
    ) -> dict[str, Literal["asleep"]]:
        """Respond once the memory is freed; see `LLM.sleep`."""
        await finished(service.llm.sleep(level, mode))
        return {"status": "asleep"}

    @app.post("/wake_up", dependencies=of_trainer)
    async def wake_up(tags: Annotated[list[MemoryTag] | None, Query()] = None) -> dict[str, bool]:
        """Allocate the memory with these tags again; without tags, all memory. See `LLM.wake_up`."""
        await finished(service.llm.wake_up(tags))
        return {"is_sleeping": await service.llm.is_sleeping()}

    @app.get("/is_sleeping", dependencies=of_trainer)
    async def is_sleeping() -> dict[str, bool]:
        """Return True from the end of a sleep until all memory is awake."""
        return {"is_sleeping": await service.llm.is_sleeping()}

    _add_weight_routes(app, service, of_trainer)


def _add_weight_routes(app: FastAPI, service: Service, of_trainer: list[Any]) -> None:
    llm = service.llm

    @app.post("/init_weight_transfer_engine", dependencies=of_trainer)
    async def init_weight_transfer_engine(body: InitBody) -> dict[str, str]:
        await finished(llm.init_weight_transfer_engine({"init_info": body.init_info}))
        return {"message": "Weight transfer initialized"}

    @app.post("/start_weight_update", dependencies=of_trainer)
    async def start_weight_update(body: StartBody | None = None) -> dict[str, str]:
        await finished(llm.start_weight_update(None if body is None else body.shapes))
        return {"message": "Weight update started"}

    @app.post("/start_draft_weight_update", dependencies=of_trainer)
    async def start_draft_weight_update(body: StartBody | None = None) -> dict[str, str]:
        await finished(llm.start_draft_weight_update(None if body is None else body.shapes))
        return {"message": "Draft weight update started"}

    @app.post("/update_weights", dependencies=of_trainer)
    async def update_weights(body: UpdateBody) -> dict[str, str]:
        if (body.update_info is None) == (body.weight_dir is None):
            raise ApiError(400, "give either update_info or weight_dir", param="update_info")
        if body.weight_dir is None:
            await finished(llm.update_weights({"update_info": body.update_info}))
        else:
            await finished(llm.update_weights_from_folder(body.weight_dir, Path(body.weight_dir).name))
        return {"message": "Weights updated"}

    @app.post("/finish_weight_update", dependencies=of_trainer)
    async def finish_weight_update(body: FinishBody | None = None) -> dict[str, str]:
        await finished(llm.finish_weight_update(None if body is None else body.weight_version))
        return {"message": "Weight update finished"}

    @app.post("/reload_weights", dependencies=of_trainer)
    async def reload_weights() -> dict[str, str]:
        await finished(llm.reload_weights())
        return {"message": "Weights reloaded"}

    @app.get("/weight_info", dependencies=of_trainer)
    async def weight_info() -> dict[str, str]:
        return {"weight_version": await llm.get_weight_version()}

    @app.post("/weight_checker", dependencies=of_trainer)
    async def weight_checker(body: CheckBody) -> dict[str, Any]:
        if body.action == "compare" and body.baseline is None:
            raise ApiError(400, "action='compare' needs a baseline", param="baseline")
        checksums = await finished(llm.weight_checksums())
        if body.baseline is None:
            return {"checksums": checksums}
        names = checksums.keys() | body.baseline.keys()
        differing = sorted(name for name in names if checksums.get(name) != body.baseline.get(name))
        return {"match": not differing, "mismatches": differing}

    @app.get("/get_world_size", dependencies=of_trainer)
    async def get_world_size(include_dp: Annotated[bool, Query()] = True) -> dict[str, int]:
        parallel = llm.config.parallel
        return {"world_size": parallel.num_ranks if include_dp else parallel.ranks_per_replica}


async def finished(work: Awaitable[Result]) -> Result:
    """Return the result of a command to the engine.

    Raises:
        ApiError: the engine has refused the command, or could not finish it.
    """
    try:
        return await work
    except WeightUpdateError as error:
        raise ApiError(409, str(error), code="weight_update_refused") from error
    except MoeserveError as error:
        raise api_error(error) from error
