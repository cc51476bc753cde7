"""Chat templates: the names Hugging Face templates use, and a sandbox that hostile ones do not leave."""

from __future__ import annotations

import time
from pathlib import Path

import llmc
import pytest
from llmc.errors import BundleError, RequestError
from llmc.runtime.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi <there> & 你"}]
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
    {{ raise_exception('System role not supported') }}
{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""


def render(source: str, messages: object = MESSAGES, **options: object) -> str:
    return ChatTemplate(source, {"bos_token": "<bos>"}, "chat_template.jinja").render(messages, **options)  # type: ignore[arg-type]


def test_a_template_as_models_ship_it() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": " yes "}, {"role": "user", "content": "go"}]
    assert render(GEMMA, messages).replace("    ", "").replace("\n\n", "\n") == (
        "<bos><start_of_turn>user\nHi <there> & 你<end_of_turn>\n<start_of_turn>model\nyes<end_of_turn>\n"
        "<start_of_turn>user\ngo<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(RequestError, match="the chat template refused the messages: Conversation roles must alternate"):
        render(GEMMA, messages[1:])
    with pytest.raises(RequestError, match="System role not supported"):
        render(GEMMA, [{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}", "Hi <there> & 你"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi <there> & 你"}]'),
        ("{{ {'b': 1, 'a': '<'} | tojson(indent=1) }}", '{\n "b": 1,\n "a": "<"\n}'),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% if true %}\n  x\n{% endif %}\n", "  x\n"),
        ("{% if tools is none and documents is none and add_generation_prompt %}y{% endif %}", "y"),
        ("{% generation %}a{{ 1 + 1 }}{% endgeneration %}", "a2"),
        ("{{ thinking is defined }} {{ bos_token }} {{ '%s' % 3 }}", "False <bos> 3"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ],
)
def test_features(source: str, expected: str) -> None:
    assert render(source) == expected


def test_strftime_now_and_options() -> None:
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert render("{{ thinking }}", thinking=False) == "False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__init__.__globals__['x'] }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self._TemplateReference__context.environment.x() }}",
        "{% set x = messages.append(1) %}",
        "{% set x = messages[0].update(role='x') %}",
        "{{ 'a' * 999999999 }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ undefined_thing.attribute }}",
        "{{ 1 / 0 }}",
        "{% include 'other' %}",
    ],
)
def test_hostile_templates_are_refused_quickly(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError) as caught:
        render(source)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] is 'hello'"),
        ([{"content": "x"}], r"messages\[0\] is"),
        ([{"role": "user"}], r"messages\[0\].content is None"),
        ([{"role": "user", "content": 5}], r"content is 5; expected text"),
        (
            [*MESSAGES, {"role": "user", "content": [{"type": "image"}]}],
            r"messages\[1\].content holds .*'image'.*'text'",
        ),
    ],
)
def test_malformed_messages(messages: object, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        render("{{ messages }}", messages)


def test_text_parts_are_joined_and_tool_calls_need_no_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]
    assert render("{{ messages[0].tool_calls[0].function.name }}", calls) == "f"


def test_not_a_template() -> None:
    with pytest.raises(BundleError, match="not a valid chat template"):
        ChatTemplate("{% if %}", {}, "chat_template.jinja")


def test_a_chat_prompt_has_one_bos(toy_bundle: Path) -> None:
    with llmc.load(toy_bundle) as engine:
        ids = engine.encoder.encode([{"role": "user", "content": "the fox"}])
        assert ids.count(0) == 1
        assert engine.tokenizer.decode(ids, skip_special_tokens=False) == "<bos>user: the fox<turn>assistant: "
