"""`/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import BaseModel

from moeserve.api.tokenizer import TextCodec
from moeserve.config.settings import LIMITS
from moeserve.server.conversation import Conversation, FunctionTool
from moeserve.server.errors import ApiError
from moeserve.server.openai.chat import Message
from moeserve.server.schema import Body, Bounded, TokenId
from moeserve.server.service import Service


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Bounded(LIMITS.max_messages, min_length=1)] | None = None
    tools: Annotated[list[FunctionTool], Bounded(LIMITS.max_tools)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None  # by default to a prompt, and not to messages, whose template writes them
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Bounded(LIMITS.max_token_ids)]


class Detokenized(BaseModel):
    prompt: str


async def tokenize(service: Service, body: TokenizeRequest) -> Tokenized:
    """Return the tokens of a text or a conversation.

    Raises:
        ApiError: neither or both are given, the tokenizer refuses them, or there is none.
    """
    service.require_model(body.model)
    codec = _codec(service)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            raise ApiError(400, "the chat template adds special tokens to messages", param="add_special_tokens")
        conversation = Conversation(
            messages=[message.model_dump(exclude_none=True) for message in body.messages],
            tools=body.tools,
            template_arguments=body.chat_template_kwargs or {},
            add_generation_prompt=body.add_generation_prompt,
        )
        token_ids = await conversation.prompt(service)
    else:
        token_ids = await asyncio.to_thread(
            codec.encode, body.prompt or "", add_special_tokens=body.add_special_tokens is not False
        )
    texts = [codec.token(token_id) for token_id in token_ids] if body.return_token_strs else None
    return Tokenized(count=len(token_ids), max_model_len=service.max_model_len, tokens=token_ids, token_strs=texts)


async def detokenize(service: Service, body: DetokenizeRequest) -> Detokenized:
    """Return the text of tokens. Unknown ids have none.

    Raises:
        ApiError: there is no tokenizer.
    """
    service.require_model(body.model)
    text = await asyncio.to_thread(_codec(service).decode, body.tokens, skip_special_tokens=False)
    return Detokenized(prompt=text)


def _codec(service: Service) -> TextCodec:
    if service.llm.codec is None:
        raise ApiError(400, "there is no tokenizer; the server can be started with --tokenizer")
    return service.llm.codec
