"""A bounded store of recent responses, in memory. Later requests may refer to stored responses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

MAX_RESPONSES = 1024
MAX_BYTES = 32 * 2**20
OVERHEAD = 1024  # estimated memory of a response in bytes, besides its JSON


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the whole conversation up to and including it."""

    response: bytes  # JSON
    context: tuple[bytes, ...]  # JSON lists of items: earlier conversation, request, response
    items: dict[str, bytes]  # output items as JSON, by id

    @property
    def num_bytes(self) -> int:
        items = sum(len(key) + len(item) for key, item in self.items.items())
        return OVERHEAD + len(self.response) + sum(map(len, self.context)) + items


class ResponseStore:
    """The last responses of one process, with a maximum number and size. Each client finds only its own responses."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._owners: dict[tuple[str, str], str] = {}  # by client and id of an item: id of the item's response
        self._num_bytes = 0

    def add(self, client: str, response_id: str, stored: StoredResponse) -> None:
        """Store a response, unless it alone is larger than the store. Delete the oldest responses to make room."""
        if stored.num_bytes > self._max_bytes:
            return
        self.delete(client, response_id)
        self._responses[client, response_id] = stored
        self._num_bytes += stored.num_bytes
        self._owners |= {(client, item_id): response_id for item_id in stored.items}
        while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
            self.delete(*next(iter(self._responses)))

    def find(self, client: str, response_id: str) -> StoredResponse | None:
        return self._responses.get((client, response_id))

    def find_item(self, client: str, item_id: str) -> bytes | None:
        """Return an output item as JSON; None if it is not stored."""
        owner = self._owners.get((client, item_id))
        return None if owner is None else self._responses[client, owner].items[item_id]

    def delete(self, client: str, response_id: str) -> bool:
        """Delete a response. Return False if the client has no such response."""
        stored = self._responses.pop((client, response_id), None)
        if stored is None:
            return False
        self._num_bytes -= stored.num_bytes
        for item_id in stored.items:
            del self._owners[client, item_id]
        return True


def joined(chunks: Sequence[bytes]) -> bytes:
    """Concatenate JSON lists to one list."""
    return b"[" + b",".join(filter(None, (chunk.strip()[1:-1].strip() for chunk in chunks))) + b"]"
