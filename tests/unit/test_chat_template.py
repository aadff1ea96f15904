"""Chat templates give the text that transformers renders, and cannot leave their sandbox."""

from __future__ import annotations

import enum
import functools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_real_tokenizers import MIXTRAL_TEMPLATE, fetched
from test_text import CHAT_TEMPLATE, byte_level_tokenizer, fast_tokenizer
from test_tiktoken_file import TEMPLATE as KIMI_TEMPLATE

from moeserve.api.chat_template import choose_template, render
from moeserve.errors import RequestError
from moeserve.models.checkpoint.tokenizer_files import load_tokenizer

# Statements, filters and functions that templates of published models use.
FEATURES = """
{%- set state = namespace(count=0, seen=[]) %}
{% for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {%- set state.count = state.count + 1 %}
    {%- generation %}{% set inner = message.content | trim %}[{{ inner }}]{% endgeneration %}
    {{- inner is defined }}{{ message.reasoning_content }}{{ message.thinking }}{{ message.get("name", "nobody") }}
    {%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{{ tools | map(attribute="function.name") | join(",") }}{% endif %}
{{- dict(a=state.count, **{"b": "<&>é"}) | tojson }}{{ strftime_now("%Y") }}{{ bos_token }}{{ pad_token is defined }}
{{- documents is none }}{{ extra is defined and extra }}{{ range(3) | list }}{{ eos_token ~ add_generation_prompt }}
"""
TEMPLATES = {"features": FEATURES, "plain": CHAT_TEMPLATE, "mixtral": MIXTRAL_TEMPLATE, "kimi": KIMI_TEMPLATE}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "z": 1.5, "a": None}}}]


class Role(str, enum.Enum):
    USER = "user"


@pytest.fixture(scope="module")
def reference() -> Any:
    return fast_tokenizer(byte_level_tokenizer(), bos_token="<s>", eos_token="</s>")


def assert_rendered_as_by_transformers(
    reference: Any, template: str, messages: Any, tools: Any = None, **arguments: Any
) -> str:
    for prompted in (False, True):
        text = render(
            template,
            messages,
            tools,
            add_generation_prompt=prompted,
            special_tokens=reference.special_tokens_map,
            arguments=arguments,
        )
        assert text == reference.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            add_generation_prompt=prompted,
            tokenize=False,
            **arguments,
        )
    return text


texts = st.text(max_size=8) | st.sampled_from(["", " x\n", "<think>a</think>b", "</s>", "<tool_response>"])
calls = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": texts, "arguments": st.just({"x": [1, None]})}),
        }
    ),
    max_size=2,
)
optional = {
    "reasoning_content": texts,
    "thinking": texts | st.none(),
    "reasoning": texts,
    "name": texts,
    "tool_calls": calls,
}


def message(role: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"role": st.just(role), "content": texts}, optional=optional)


turns = st.lists(st.tuples(message("user"), message("assistant")), max_size=2)
conversations = st.builds(
    lambda system, pairs, last: [*system, *(message for pair in pairs for message in pair), last],
    st.lists(message("system"), max_size=1),
    turns,
    message("user"),
)


@pytest.mark.parametrize("name", list(TEMPLATES))
@given(messages=conversations, tools=st.sampled_from([None, TOOLS]), extra=st.sampled_from([None, True, [1, [2, "a"]]]))
@settings(max_examples=30)
def test_text_is_that_of_transformers(name: str, reference: Any, messages: Any, tools: Any, extra: Any) -> None:
    assert_rendered_as_by_transformers(reference, TEMPLATES[name], messages, tools, extra=extra)


@functools.cache
def published_template(name: str) -> str:
    tokenizer = load_tokenizer(str(fetched(name)))
    assert tokenizer is not None
    return tokenizer.chat_templates["default"]


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
@given(messages=conversations, tools=st.sampled_from([None, TOOLS]))
@settings(max_examples=30)
def test_text_of_published_templates_is_that_of_transformers(
    name: str, reference: Any, messages: Any, tools: Any
) -> None:
    if name == "deepseek-v3":  # its template writes what a call's arguments are as text
        messages = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
    assert_rendered_as_by_transformers(reference, published_template(name), messages, tools)


def test_special_tokens_can_be_replaced_and_subclasses_are_plain(reference: Any) -> None:
    messages = [{"role": Role.USER, "content": "a"}]
    text = assert_rendered_as_by_transformers(
        reference, "{{ bos_token }}{{ messages[0].role }}", messages, bos_token="!"
    )
    assert text == "!user"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ dict.mro() }}",
        "{{ namespace.__init__ }}",
        "{% set x = namespace(_a=1) %}",
        "{% set x = namespace() %}{% set x.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set self.x = 1 %}",
        "{{ undefined.attribute }}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('no') }}",
        "{% for %}",
    ],
)
def test_what_a_template_may_not_do_has_the_same_end_as_in_transformers(reference: Any, template: str) -> None:
    """An error, or no text, for an attribute that the sandbox hides."""
    messages = [{"role": "user", "content": "a"}]
    try:
        expected = reference.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception as error:
        reason = re.escape(str(error).rpartition("object' ")[2])  # without the name of a class of transformers
        with pytest.raises(RequestError, match="attribute '_" if "underscore" in str(error) else reason):
            render(template, messages, None, add_generation_prompt=False, special_tokens={}, arguments={})
    else:
        assert expected == ""
        assert render(template, messages, None, add_generation_prompt=False, special_tokens={}, arguments={}) == ""


def test_what_is_no_plain_data_is_refused() -> None:
    messages = [{"role": "user", "content": "a", "image": object()}]
    with pytest.raises(RequestError, match=r"object\).* convert it"):
        render("", messages, None, add_generation_prompt=False, special_tokens={}, arguments={})


def test_a_template_is_chosen_by_name_or_use() -> None:
    templates = {"default": "a", "tool_use": "b", "rag": "c"}
    assert choose_template(templates, None, has_tools=False) == "a"
    assert choose_template(templates, None, has_tools=True) == "b"
    assert choose_template(templates, "rag", has_tools=True) == "c"
    assert choose_template(templates, "{{ x }}", has_tools=True) == "{{ x }}"
    with pytest.raises(RequestError, match=r"no default .* rag"):
        choose_template({"rag": "c"}, None, has_tools=False)
