"""Chat templates that run away fail with a named error, and leave no memory behind."""

from __future__ import annotations

import os
import threading
from typing import Any

import psutil
import pytest

from moeserve.api.chat_template import render, render_conversation
from moeserve.errors import RequestError

ALLOWED_GROWTH_BYTES = 64 * 2**20
DOUBLED_LISTS = "{% set n = namespace(d=[1]) %}{% for i in range(60) %}{% set n.d = [n.d, n.d] %}{% endfor %}"
DOUBLED_TEXT = "{% set n = namespace(d='ab') %}{% for i in range(60) %}{% set n.d = n.d ~ n.d %}{% endfor %}"
TEMPLATES = {
    "multiplied text": "{{ ('a' * 10**10) | length }}",
    "multiplied list": "{{ ([1] * 10**10) | length }}",
    "padded by %": "{{ '%10000000000d' % 1 }}",
    "padded by format": "{{ '{:10000000000d}'.format(1) }}",
    "center": "{{ 'a' | center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "indent": "{{ ('a\n' * 10000) | indent(10**7) }}",
    "join": "{{ range(99999) | join('a' * 10**6) }}",
    "replace": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "batch": "{{ [1] | batch(10**10, 0) | list }}",
    "JSON": "{{ range(99999) | list | tojson(indent=10**6) }}",
    "words": "{{ lipsum(n=10**9) }}",
    "exponentiation": "{{ 10 ** (10 ** 9) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "doubled lists": DOUBLED_LISTS + "{{ n.d | tojson }}",
    "compared lists": DOUBLED_LISTS + "{% set m = namespace(d=n.d) %}" + DOUBLED_LISTS + "{{ m.d == n.d }}",
    "doubled text": DOUBLED_TEXT,
    "macros": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "macros that branch": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "much text": "{% for a in range(9999) %}{{ 'a' * 10000 }}{% endfor %}",
    "deep source": "{{ " + "(" * 10**5 + "1" + ")" * 10**5 + " }}",
}


def text_of(template: str) -> str:
    messages = [{"role": "user", "content": "hi"}]
    return render(template, messages, None, add_generation_prompt=True, special_tokens={}, arguments={})


@pytest.mark.slow_but("multiplied", "center")
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_template_that_runs_away_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        text_of(TEMPLATES[name])


def test_neither_this_process_nor_another_keeps_memory() -> None:
    assert text_of("{{ messages[0].content }}") == "hi"
    before = num_bytes()
    for name in ("multiplied text", "JSON", "doubled text", "much text"):
        with pytest.raises(RequestError):
            text_of(TEMPLATES[name])
    assert text_of("{{ messages[0].content }}") == "hi"
    assert num_bytes() < before + ALLOWED_GROWTH_BYTES


def num_bytes() -> int:
    """Return the memory of this process and of those that render templates."""
    this = psutil.Process()
    rendering = [each for each in this.children() if "moeserve.api.template_sandbox" in each.cmdline()]
    return sum(each.memory_full_info().uss for each in [this, *rendering])


def test_a_conversation_with_such_a_template_is_refused_by_a_named_error() -> None:
    with pytest.raises(RequestError) as caught:
        render_conversation(
            TEMPLATES["loops"],
            [{"role": "user", "content": "hi"}],
            None,
            add_generation_prompt=True,
            continue_final_message=False,
            special_tokens={},
            arguments={},
        )
    assert caught.value.code == "chat_template_exceeds_limits"


def test_texts_come_back_as_they_are() -> None:
    arguments: dict[str, Any] = {"given": [[1, "a"], 10**30, "\ud800", {"2": None}]}
    messages = [{"role": "user", "content": "é\n𝄞"}]
    text = render(
        "{{ messages[0].content }}{{ given }}",
        messages,
        None,
        add_generation_prompt=True,
        special_tokens={},
        arguments=arguments,
    )
    assert text == "é\n𝄞" + str(arguments["given"])


def test_long_conversations_are_within_the_limits() -> None:
    content = "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 600
    messages = [{"role": ("user", "assistant")[place % 2], "content": content} for place in range(4095)]
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}{% endfor %}"
    text = render_conversation(
        template,
        messages,
        [{"function": {"name": f"f{number}", "parameters": {}}} for number in range(500)],
        add_generation_prompt=True,
        continue_final_message=False,
        special_tokens={},
        arguments={},
    )
    assert text.count(content) == len(messages)


def test_threads_and_a_fork_get_their_own_answers() -> None:
    results: dict[int, str] = {}

    def work(number: int) -> None:
        for _ in range(20):
            results[number] = text_of(f"{{{{ {number} }}}}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: str(number) for number in range(4)}
    if not (child := os.fork()):
        os._exit(text_of("{{ 7 }}") != "7")
    assert os.waitpid(child, 0)[1] == 0
    assert text_of("{{ 8 }}") == "8"
