"""`RouteBuffer`: the experts that the routers of one rank choose for the tokens of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moeserve.config.engine_config import EngineConfig
from moeserve.config.routes import RouteShape
from moeserve.kv.route_store import RouteStore
from moeserve.layers.moe.router import RoutePlace
from moeserve.models.decoder import Decoder
from moeserve.models.rank_model import RankModel
from moeserve.protocol import RouteRows
from moeserve.step_inputs import StepInputs
from moeserve.worker.request_table import Chunk


class RouteBuffer:
    """Memory into which the routers of a rank write the experts of each token. Also passes forced experts to the
    routers.

    The address of the memory never changes, so captured steps can write to it too. L: layers of the rank's stage.
    """

    def __init__(self, model: Decoder, shape: RouteShape, num_tokens: int) -> None:
        """
        Args:
            num_tokens: maximum number of tokens in a step.
        """
        self._shape = shape
        self._layers = range(model.stage.start, min(model.stage.stop, shape.num_layers))
        self._memory_LTK = torch.zeros(len(self._layers), num_tokens, shape.top_k, dtype=torch.int64)
        for number, layer in model.moe_layers.items():
            if number in self._layers:
                place = self._layers.index(number)
                layer.router.route_place = RoutePlace(place, self._memory_LTK[place])

    def read(self, num_rows: int) -> RouteRows:
        """Return the experts chosen for the first `num_rows` rows of the step that has just run."""
        rows_TLK = self._memory_LTK[:, :num_rows].numpy().astype(self._shape.dtype).swapaxes(0, 1)
        return RouteRows(first_layer=self._layers.start, rows=rows_TLK.tobytes())

    def forced(self, step: StepInputs, chunks: Sequence[Chunk]) -> StepInputs:
        """Return the step with `forced_routes`, if a request of these chunks forces the experts of its tokens."""
        if not any(chunk.request.forced_routes for chunk in chunks):
            return step
        shape = self._shape
        forced_TLK = np.full((len(step.token_ids), len(self._layers), shape.top_k), -1, np.int64)
        first = 0
        for chunk in chunks:
            if chunk.request.forced_routes:
                all_TLK = np.frombuffer(chunk.request.forced_routes, shape.dtype)
                all_TLK = all_TLK.reshape(-1, shape.num_layers, shape.top_k)[:, self._layers.start : self._layers.stop]
                own_TLK = all_TLK[chunk.start : chunk.end]
                forced_TLK[first : first + len(own_TLK)] = own_TLK
            first += len(chunk.token_ids)
        forced_LTK: Tensor = torch.from_numpy(forced_TLK.swapaxes(0, 1).copy())
        return dataclasses.replace(step, forced_routes=forced_LTK)


def route_buffer_of(config: EngineConfig, model: RankModel) -> RouteBuffer | None:
    """Return a new `RouteBuffer` for a rank's model; None if outputs do not contain routes."""
    if config.experts.routes is None:
        return None
    assert isinstance(model, Decoder), "other models have no route shape"
    return RouteBuffer(model, config.experts.routes, config.schedule.max_num_batched_tokens)


def routes_of_copies(config: EngineConfig, num_blocks: int) -> RouteStore | None:
    """Return memory for the routes of blocks that are copied to a store or other engines; None if no blocks are."""
    store, routes = config.store, config.experts.routes
    if routes is None or not (store.kv_folder or store.kv_host_memory or store.kv_transfer_address):
        return None
    return RouteStore(routes, num_blocks, config.cache.block_size)
