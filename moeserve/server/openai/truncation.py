"""`truncation: "auto"` of the Responses API: the oldest items of a conversation that is too long are left out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from moeserve.server.openai.response_items import CallItem, CallOutputItem, Item, MessageItem, ReasoningItem


def removable_groups(items: Sequence[Item]) -> list[list[int]]:
    """Return groups of indices of items that may be left out, the oldest group first.

    The items of a group are left out together: a call with its results, and reasoning with the item after it. System
    and developer messages, and the last user message, are in no group.
    """
    messages = [(place, item) for place, item in enumerate(items) if isinstance(item, MessageItem)]
    kept = {place for place, item in messages if item.role in ("system", "developer")}
    kept |= {max((place for place, item in messages if item.role == "user"), default=-1)}
    groups: list[list[int]] = []
    group_of_call: dict[str, list[int]] = {}
    reasoning: list[int] = []
    for place, item in enumerate(items):
        if place in kept:
            continue
        if isinstance(item, ReasoningItem):
            reasoning.append(place)
        elif isinstance(item, CallOutputItem) and item.call_id in group_of_call:
            group_of_call[item.call_id].append(place)
        else:
            groups.append([*reasoning, place])
            reasoning = []
            if isinstance(item, CallItem):
                group_of_call[item.call_id] = groups[-1]
    return groups


async def shortened(
    items: Sequence[Item], num_tokens: Callable[[list[Item]], Awaitable[int]], max_tokens: int
) -> list[Item] | None:
    """Leave out as few of the oldest items as possible, so that the prompt has at most `max_tokens` tokens.

    Args:
        num_tokens: returns the number of tokens of the prompt for some items.

    Returns:
        The remaining items. None: even the items that must stay are too long.
    """
    groups = removable_groups(items)

    def without(number: int) -> list[Item]:
        removed = {place for group in groups[:number] for place in group}
        return [item for place, item in enumerate(items) if place not in removed]

    if await num_tokens(without(len(groups))) > max_tokens:
        return None
    too_few, enough = 0, len(groups)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if await num_tokens(without(middle)) > max_tokens:
            too_few = middle
        else:
            enough = middle
    return without(enough)
