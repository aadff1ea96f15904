"""`/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import BaseModel, Field
from starlette.responses import Response

from moeserve.api.tokenizer import TextCodec
from moeserve.config.limits import LIMITS
from moeserve.models.checkpoint.tokenizer_files import tokenizer_config
from moeserve.server.client import Client
from moeserve.server.conversation import Conversation
from moeserve.server.errors import ApiError
from moeserve.server.openai.chat import Message, template_input
from moeserve.server.openai.chat_tools import Tools, offered_tools
from moeserve.server.reply import JSON, encode_json
from moeserve.server.schema import Bounded, RequestBody, TokenId
from moeserve.server.service import Service


class TokenizeRequest(RequestBody):
    prompt: Annotated[str, Field(max_length=LIMITS.max_text_length)] | None = None
    messages: Annotated[list[Message], Bounded(LIMITS.max_messages, min_length=1)] | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None  # default: True for a prompt, False for messages, whose template adds them
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    return_token_strs: bool = False


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeRequest(RequestBody):
    tokens: Annotated[list[TokenId], Bounded(LIMITS.max_token_ids)]


class Detokenized(BaseModel):
    prompt: str


async def tokenize(service: Service, client: Client, body: TokenizeRequest) -> Response:
    """Return the tokens of a text or a conversation, in the form of `Tokenized`.

    Raises:
        ApiError: both a text and a conversation are given, or neither; the tokenizer refuses it; or there is no
            tokenizer.
    """
    service.begin(body)
    codec = _codec(service)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")

    def tokenized(token_ids: list[int]) -> bytes:
        texts = [codec.token(token_id) for token_id in token_ids] if body.return_token_strs else None
        answer = {"count": len(token_ids), "max_model_len": service.max_model_len}
        return encode_json(answer | {"tokens": token_ids, "token_strs": texts})

    if body.messages is not None:
        if body.add_special_tokens:
            raise ApiError(400, "the chat template adds special tokens to messages", param="add_special_tokens")
        conversation = Conversation(
            messages=template_input(body.messages),
            tools=offered_tools(body.tools or ()),
            template_arguments=body.chat_template_kwargs or {},
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=service.allowed_template(body.chat_template),
        )
        token_ids = await conversation.prompt(service, client)
        return Response(await asyncio.to_thread(tokenized, token_ids), media_type=JSON)

    def encode() -> bytes:
        return tokenized(codec.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False))

    async with service.preparation.admitted(client.name, 1):
        return Response(await asyncio.to_thread(encode), media_type=JSON)


async def detokenize(service: Service, body: DetokenizeRequest) -> Detokenized:
    """Return the text of tokens. Unknown ids have no text.

    Raises:
        ApiError: there is no tokenizer.
    """
    service.begin(body)
    text = await asyncio.to_thread(_codec(service).decode, body.tokens, skip_special_tokens=False)
    return Detokenized(prompt=text)


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Return the configuration of the tokenizer, with its special tokens and the chat template.

    Raises:
        ApiError: there is no tokenizer.
    """
    codec = _codec(service)
    info = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config(codec.tokenizer.path)}
    template = service.chat_template or codec.chat_template
    templates = {} if template is None else {"chat_template": template}
    return {**info, **codec.tokenizer.special_tokens, **templates}


def _codec(service: Service) -> TextCodec:
    if service.llm.codec is None:
        raise ApiError(400, "there is no tokenizer; the server can be started with --tokenizer")
    return service.llm.codec
