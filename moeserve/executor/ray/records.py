"""The progress records of actors, which travel with the calls that carry their channels."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence

from moeserve.executor.ray.actors import ActorHandle
from moeserve.processes.progress_records import ProgressRecord

# A node none of whose actors has answered for this long may be lost, so the records of its actors are unknown.
SECONDS_WITHOUT_ANSWER = 2.0


class ActorRecords:
    """The progress records of actors, as they last arrived. See `Records`."""

    def __init__(self, actors: Sequence[ActorHandle], nodes: Sequence[Hashable]) -> None:
        """
        Args:
            nodes: the node of each actor.
        """
        self._actors, self._nodes = actors, nodes

    def read(self) -> list[ProgressRecord | None]:
        now_s = time.monotonic()
        found = list(zip(self._actors, self._nodes, strict=True))
        answering = {node for actor, node in found if now_s - actor.answered_s <= SECONDS_WITHOUT_ANSWER}
        return [actor.record if node in answering else None for actor, node in found]
