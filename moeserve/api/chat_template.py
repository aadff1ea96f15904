"""The choice of a chat template, and the text that it renders for a conversation.

A template comes with a checkpoint, and may run for ever or fill the memory. So it is rendered in a process of its own
with limits; see `template_sandbox`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from moeserve.config.environment import environment_with
from moeserve.errors import RequestError, shown
from moeserve.processes.interpreter import same_modules
from moeserve.processes.limited import LimitedProcess, ProcessLimits

RENDERING_LIMITS = ProcessLimits(
    cpu_seconds=1.0,
    deadline_s=20.0,
    max_added_bytes=64 * 2**20,
    max_kept_bytes=24 * 2**20,
    max_answers=2**31,
)
MAX_RENDERED_BYTES = 2**23  # limit of a conversation's text; the server's default limit of a request's body
RENDERED, REFUSED = b"+", b"-"  # first byte of an answer; the text or the reason follows
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


def choose_template(templates: Mapping[str, str], template: str | None, *, has_tools: bool) -> str:
    """Return the template to use: either the given template, or a template of the checkpoint.

    Args:
        templates: the checkpoint's templates by name.
        template: a template, or the name of a template of the checkpoint; None: the checkpoint's default, or its
            template for tools.

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
    variables = _variables(tools, special_tokens, arguments, add_generation_prompt=add_generation_prompt)
    return _rendered(template, messages, variables, continue_final_message=continue_final_message, has_forms=True)


def render(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    *,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> str:
    """Return the text that a template renders for messages, without bringing the messages into another form.

    Args:
        special_tokens: variables of the template such as "bos_token", by name.
        arguments: further variables, which override special tokens of the same name.

    Raises:
        RequestError: an argument has a reserved name or is not plain data, the template raises an error, or it takes
            too much time or memory.
    """
    variables = _variables(tools, special_tokens, arguments, add_generation_prompt=add_generation_prompt)
    return _rendered(template, messages, variables, continue_final_message=False, has_forms=False)


def _variables(
    tools: list[dict[str, Any]] | None,
    special_tokens: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
) -> dict[str, Any]:
    """Return the variables of a template other than the messages."""
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise RequestError(f"the variables of the chat template, {shown(arguments)}, must be a dict with text keys")
    if reserved := sorted(RESERVED_NAMES & arguments.keys()):
        raise RequestError(f"{reserved[0]!r} cannot be a variable of the chat template: the name is reserved")
    given = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    return {"documents": None, **special_tokens, **arguments, **given}


def _rendered(template: str, messages: list[dict[str, Any]], variables: dict[str, Any], **options: bool) -> str:
    """Render messages in the rendering process. They are sent as JSON: tuples become lists, and keys become strings.

    Args:
        options: options of `template_sandbox.rendered`.
    """
    try:
        fields = _plain({"template": template, "messages": messages, "variables": variables, **options})
        message = json.dumps(fields).encode()  # in ASCII, so that texts may hold lone surrogates
    except RecursionError:
        raise _too_deep() from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"the variables of the chat template must be JSON: {error}") from None
    answer = _process().answer(message)
    if answer is None:
        raise RequestError(
            "the chat template takes too much time or memory to render the messages; use another template, or a "
            "shorter conversation",
            code="chat_template_exceeds_limits",
        )
    text = answer[1:].decode(errors="surrogatepass")
    if answer[:1] == REFUSED:
        raise RequestError(text)
    return text


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


def _too_deep() -> RequestError:
    return RequestError("the conversation has too many levels of lists and dicts for a chat template")


@functools.cache
def _process() -> LimitedProcess:
    """Return the process that renders all templates of this process."""
    return LimitedProcess(
        "moeserve.api.template_sandbox", RENDERING_LIMITS, lambda: environment_with(same_modules()), lambda: b""
    )
