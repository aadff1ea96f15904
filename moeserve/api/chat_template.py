"""Renders chat templates as transformers does: in jinja's sandbox, with the same filters, functions and tags.

Templates come with checkpoints, so they are untrusted code. They can access plain data only, no Python objects.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from moeserve.api.template_messages import template_messages
from moeserve.errors import RequestError, shown

# Names that users cannot pass as variables: arguments of this module and of transformers' apply_chat_template.
RESERVED_NAMES = frozenset(
    [
        "messages",
        "conversation",
        "tools",
        "add_generation_prompt",
        "chat_template",
        "tokenize",
        "continue_final_message",
    ]
)
END_MARK = "\ue000end\ue000"  # marks the end of a content that is to be continued
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # keys of a message; most templates read the first


def choose_template(templates: Mapping[str, str], template: str | None, *, has_tools: bool) -> str:
    """Return the template to use: either the given one, or one of the checkpoint.

    Args:
        templates: the checkpoint's templates by name.
        template: a template, or the name of one; None: the checkpoint's default, or its template for tools.

    Raises:
        RequestError: the checkpoint has no such template.
    """
    if template is not None:
        return templates.get(template, template)
    for name in ("tool_use", "default") if has_tools else ("default",):
        if name in templates:
            return templates[name]
    has = f"no default among its chat templates {', '.join(sorted(templates))}" if templates else "no chat template"
    raise RequestError(
        f"the checkpoint's tokenizer has {has}; pass chat_template, or write the conversation as one prompt and pass "
        "that to generate"
    )


def render_conversation(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    special_tokens: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> str:
    """Return the text of a conversation, with its messages in a form that the template renders.

    Args:
        continue_final_message: end the text after the content of the last message.
        special_tokens, arguments: as for `render`.

    Raises:
        RequestError: as for `render`; or the last message has no content to continue.
    """
    if continue_final_message:
        messages = _with_end_mark(messages)
        add_generation_prompt = False
    refusal: RequestError | None = None
    for form in template_messages(messages, template, tools):
        try:
            text = render(
                template,
                form,
                tools,
                add_generation_prompt=add_generation_prompt,
                special_tokens=special_tokens,
                arguments=arguments,
            )
        except RequestError as error:
            refusal = refusal or error
            continue
        return _before_end_mark(text) if continue_final_message else text
    assert refusal is not None, "there is at least one form"
    raise refusal


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


def render(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    *,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> str:
    """Return the text of a conversation.

    Args:
        special_tokens: variables of the template such as "bos_token", by name.
        arguments: further variables, which override special tokens of the same name.

    Raises:
        RequestError: an argument has a reserved name or is not plain data, or the template raises an error.
    """
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise RequestError(f"the variables of the chat template, {shown(arguments)}, must be a dict with text keys")
    if reserved := sorted(RESERVED_NAMES & arguments.keys()):
        raise RequestError(f"{reserved[0]!r} cannot be a variable of the chat template: the name is reserved")
    try:
        text = _compiled(template).render(
            messages=[_complete(_plain(message)) for message in messages],
            tools=_plain(tools),
            add_generation_prompt=add_generation_prompt,
            **{"documents": None} | _plain({**special_tokens, **arguments}),
        )
    except RequestError:
        raise
    except Exception as error:  # of any type: raised by the template or by its expressions
        raise RequestError(f"the chat template cannot render the messages: {error}") from error
    return text


def _complete(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without keys whose value is None, and with its reasoning under every name that templates read.

    A content of None is kept, because some templates write tool calls only if the content is present.
    """
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Return a copy of plain data. Subclasses are converted to the plain types, whose methods the sandbox knows."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int(value)
        case float():
            return float(value)
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case tuple():
            return tuple(_plain(item) for item in value)
    raise RequestError(
        f"the conversation has {shown(value)} ({type(value).__name__}); chat templates take texts, numbers, lists and "
        "dicts: convert it to these"
    )


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
