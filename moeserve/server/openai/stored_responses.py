"""Stored responses of the Responses API: retrieval, deletion, continuation, and references to their items."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel
from starlette.responses import Response

from moeserve.server.client import Client
from moeserve.server.errors import ApiError
from moeserve.server.openai.response_items import ITEM, Item, ItemReference
from moeserve.server.openai.response_store import ResponseStore, StoredResponse
from moeserve.server.reply import JSON


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


def retrieve(store: ResponseStore | None, client: Client, response_id: str) -> Response:
    """Return a stored response.

    Raises:
        ApiError: the response was never stored, or has been deleted.
    """
    return Response(_stored(store, client, response_id).response, media_type=JSON)


def delete(store: ResponseStore | None, client: Client, response_id: str) -> DeletedResponse:
    """Delete a stored response.

    Raises:
        ApiError: the response was never stored, or has been deleted.
    """
    _stored(store, client, response_id)
    assert store is not None, "a response was found"
    store.delete(client.name, response_id)
    return DeletedResponse(id=response_id, object="response", deleted=True)


def previous(store: ResponseStore | None, client: Client, response_id: str) -> StoredResponse:
    """Return the stored response that a request continues.

    Raises:
        ApiError: the response was never stored, or has been deleted.
    """
    found = None if store is None else store.find(client.name, response_id)
    if found is None:
        why = _not_stored(store, f"the previous response {response_id[:100]!r}")
        raise ApiError(
            400,
            f"{why}. Send the whole conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


def without_references(store: ResponseStore | None, client: Client, items: list[Item]) -> list[Item]:
    """Return the items, with references replaced by the stored items.

    Raises:
        ApiError: an item was never stored, or has been deleted.
    """
    return [_referred(store, client, item) if isinstance(item, ItemReference) else item for item in items]


def _stored(store: ResponseStore | None, client: Client, response_id: str) -> StoredResponse:
    found = None if store is None else store.find(client.name, response_id)
    if found is None:
        raise ApiError(404, _not_stored(store, f"the response {response_id[:100]!r}"), code="response_not_found")
    return found


def _not_stored(store: ResponseStore | None, what: str) -> str:
    why = "responses are not stored here" if store is None else "only recent responses are, in memory"
    return f"{what} is not stored: {why}"


def _referred(store: ResponseStore | None, client: Client, reference: ItemReference) -> Item:
    found = None if store is None else store.find_item(client.name, reference.id)
    if found is None:
        why = _not_stored(store, f"the item {reference.id[:100]!r}")
        raise ApiError(
            404, f"{why}. Send the item itself, as clients do with store=false", param="input", code="item_not_found"
        )
    return ITEM.validate_json(found)
