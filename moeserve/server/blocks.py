"""An answer as a sequence of blocks: reasoning, text, and tool calls, each complete before the next begins."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal

from moeserve.server.conversation import TurnDelta

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """One block of an answer, as generated so far."""

    index: int
    kind: Kind
    text: str = ""  # of a call: the arguments as JSON
    call_id: str = ""
    name: str = ""  # of a call: the name of the function
    id: str = field(default_factory=lambda: secrets.token_hex(12))


@dataclass(frozen=True)
class BlockEvent:
    """The beginning of a content block of an answer, a piece of the block's text, or the block's end."""

    kind: Literal["begin", "piece", "end"]
    block: Block
    piece: str = ""


@dataclass
class Turn:
    """An answer with a single output, as generated so far."""

    blocks: list[Block] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt: int = 0  # prompt tokens
    num_cached: int = 0
    num_output: int = 0
    num_reasoning: int = 0  # reasoning tokens of the output, including the opening marker


async def block_events(deltas: AsyncGenerator[TurnDelta, None], turn: Turn) -> AsyncGenerator[BlockEvent, None]:
    """Yield the events of an answer, and update `turn`. An answer without text or calls has no blocks."""
    num_unread = 0  # tokens whose text is held back or is part of a marker
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            turn.num_prompt, turn.num_cached = len(delta.prompt_token_ids), delta.num_cached
            turn.num_output += len(delta.output.token_ids)
            num_unread += len(delta.output.token_ids)
            if delta.content or delta.tool_calls:
                num_unread = 0
            elif delta.reasoning:
                turn.num_reasoning += num_unread
                num_unread = 0
            turn.finish_reason, turn.stop_reason = delta.finish_reason, delta.output.stop_reason
            pieces: list[tuple[Kind, str]] = [("reasoning", delta.reasoning), ("text", delta.content)]
            for kind, piece in pieces:
                if piece:
                    if not turn.blocks or turn.blocks[-1].kind != kind:
                        for event in _next_block(turn, Block(len(turn.blocks), kind)):
                            yield event
                    yield _extended(turn, piece)
            for call in delta.tool_calls:
                if call.id is not None:
                    new = Block(len(turn.blocks), "call", call_id=call.id, name=call.name or "")
                    for event in _next_block(turn, new):
                        yield event
                if call.arguments:
                    yield _extended(turn, call.arguments)
    if turn.blocks:
        yield BlockEvent("end", turn.blocks[-1])


def _next_block(turn: Turn, block: Block) -> list[BlockEvent]:
    ended = [BlockEvent("end", turn.blocks[-1])] if turn.blocks else []
    turn.blocks.append(block)
    return [*ended, BlockEvent("begin", block)]


def _extended(turn: Turn, piece: str) -> BlockEvent:
    block = turn.blocks[-1]
    block.text += piece
    return BlockEvent("piece", block, piece)
