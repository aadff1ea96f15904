"""Renders chat templates as transformers does: in jinja's sandbox, with the same filters, functions and tags.

Templates come with checkpoints, so they are untrusted code. They can access plain data only, no Python objects. Nothing
here bounds their time and memory: `chat_template` runs this file in a process with limits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from moeserve.api.chat_template import MAX_RENDERED_BYTES, REFUSED, RENDERED, RENDERING_LIMITS
from moeserve.api.template_messages import template_messages
from moeserve.errors import RequestError
from moeserve.processes.limited import answer_messages

END_MARK = "\ue000end\ue000"  # marks the end of a content that is to be continued
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # keys of a message; most templates read the first


def answer(message: bytes) -> bytes:
    """Render a conversation.

    Args:
        message: JSON with the arguments of `rendered`.

    Returns:
        `RENDERED` and the text, or `REFUSED` and the error.
    """
    try:
        kind, text = RENDERED, rendered(**json.loads(message))
        if len(text) > MAX_RENDERED_BYTES:
            raise RequestError(
                f"the chat template renders {len(text)} characters; at most {MAX_RENDERED_BYTES} are allowed"
            )
    except RequestError as error:
        kind, text = REFUSED, str(error)
    return kind + text.encode(errors="surrogatepass")


def rendered(
    template: str,
    messages: list[dict[str, Any]],
    *,
    continue_final_message: bool,
    has_forms: bool,
    variables: dict[str, Any],
) -> str:
    """Return the text of a conversation.

    Args:
        continue_final_message: end the text after the content of the last message.
        has_forms: change messages to forms that the template renders.
        variables: all other variables of the template.

    Raises:
        RequestError: the template raises an error; or the last message has no content to continue.
    """
    if continue_final_message:
        messages = _with_end_mark(messages)
        variables = {**variables, "add_generation_prompt": False}
    refusal: RequestError | None = None
    for form in template_messages(messages, template, variables["tools"]) if has_forms else [messages]:
        try:
            text = render(template, form, variables)
        except RequestError as error:
            refusal = refusal or error
            continue
        return _before_end_mark(text) if continue_final_message else text
    assert refusal is not None, "there is at least one form"
    raise refusal


def render(template: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """Return the text that a template renders for messages.

    Raises:
        RequestError: the template raises an error.
        MemoryError: the template needs more memory than this process may have.
    """
    try:
        return _compiled(template).render(messages=[_complete(message) for message in messages], **variables)
    except MemoryError:
        raise
    except Exception as error:  # of any type: raised by the template or by its expressions
        raise RequestError(f"the chat template cannot render the messages: {error}") from error


def _with_end_mark(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = messages[-1]
    if last.get("tool_calls") or not isinstance(last.get("content"), str):
        raise RequestError("continue_final_message needs a last message with a content, and without tool calls")
    return [*messages[:-1], {**last, "content": last["content"] + END_MARK}]


def _before_end_mark(text: str) -> str:
    before, mark, _ = text.rpartition(END_MARK)
    if not mark:
        raise RequestError("continue_final_message: the chat template does not render the content of the last message")
    return before


def _complete(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without keys whose value is None, and with its reasoning under every name that templates read.

    A content of None is kept, because some templates write tool calls only if the content is present.
    """
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_MakeDict(),
        namespace=_PlainNamespace,
    )
    return environment


class GenerationBlocks(Extension):
    """The tag {% generation %}, which marks text written by the model. It does not change the text."""

    tags = {"generation"}  # noqa: RUF012, declared like this by the base class

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_text_of"), [], [], body).set_lineno(line)

    def _text_of(self, caller: Callable[[], str]) -> str:
        return caller()


class _MakeDict:
    """The function `dict` of templates. The type itself would expose its attributes."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _PlainNamespace(Namespace):
    """The function `namespace` of templates, which refuses names that begin with an underscore."""

    def __init__(*arguments: Any, **named: Any) -> None:
        self, *pairs = arguments  # so that a template can set an attribute named `self`
        values = dict(*pairs, **named)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template cannot have the attribute {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON text. Unlike jinja's own filter, this one does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    answer_messages(lambda _: answer, RENDERING_LIMITS)
