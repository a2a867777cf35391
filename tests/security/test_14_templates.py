"""Finding 14: a chat template from the bucket can neither hang the server nor fill its memory.

A loop in one held vLLM's only thread for rendering, and at vLLM's start the whole Space.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from delta_weight_sync.vllm.engine import EngineError
from inference_space import template_costs, templates
from inference_space.template_costs import STEPS
from inference_space.template_source import MAX_SOURCE

USER = {"role": "user", "content": "hello"}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"a": 1, "b": "x"}}}
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    USER,
    {"role": "assistant", "content": "<think>well</think> yes", "tool_calls": [CALL]},
    {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "42"},
    {"role": "user", "content": "bye"},
]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "description": "n"}},
    "required": ["a"],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}]
PEAK = 300 << 10  # KiB; the harmless ones of these make 64 MB

GROWN = "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = BODY %}{% endfor %}{{ n.x }}"
LIST = "{% set n = namespace(x=['a']) %}{% for i in range(99) %}{% set n.x = BODY %}{% endfor %}{{ n.x }}"
LONG = "{% set n = namespace(x='a' ~ 'b') %}{% for i in range(20) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
TWICE = "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(90) }}"
TURNS = "{% for i in range(9999) %}"
HOSTILE = {
    "counts": "{{ range(10 ** 9)|list }}",
    "counts in a loop": "{% for i in range(1000000000) %}{% endfor %}",
    "loops in loops": 4 * TURNS + 4 * "{% endfor %}",
    "loops over letters": LONG + 3 * "{% for c in n.x %}" + 3 * "{% endfor %}",
    "calls itself twice": TWICE,
    "a loop that calls itself": "{% for i in [[1]] recursive %}{{ loop(i) }}{% endfor %}",
    "doubles by +": GROWN.replace("BODY", "n.x + n.x"),
    "doubles by ~": GROWN.replace("BODY", "n.x ~ n.x"),
    "doubles by replace": GROWN.replace("BODY", "n.x|replace('a', 'aa')"),
    "doubles by join": GROWN.replace("BODY", "[n.x, n.x]|join('a')"),
    "doubles a block": GROWN.replace("{% set n.x = BODY %}", "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
    "doubles a list": LIST.replace("BODY", "n.x + n.x"),
    "nests a list": LIST.replace("BODY", "[n.x, n.x]"),
    "nests a tuple": LIST.replace("BODY", "(n.x, n.x)"),
    "nests a dictionary": LIST.replace("BODY", "{'a': n.x, 'b': n.x}"),
    "nests what a macro is given": "{% macro m() %}{{ varargs }}{% endmacro %}{{ m(1, 2) }}",
    "multiplies": "{{ 'a' * 99999999999 }}",
    "raises to a power": "{{ 9 ** 9 ** 9 }}",
    "pads": "{{ 'a'|center(99999999999) }}",
    "pads by a method": "{{ 'a'.ljust(99999999999) }}",
    "pads by %": "{{ '%99999999999d' % 1 }}",
    "pads by format": "{{ '%99999999999d'|format(1) }}",
    "pads by a method's format": "{{ '{:>99999999999}'.format(1) }}",
    "indents": "{{ {'a': [1]}|tojson(indent=99999999999) }}",
    "writes long separators": LONG + "{{ range(9999)|list|tojson(separators=(n.x, n.x)) }}",
    "replaces nothing by much": LONG + "{{ n.x|replace('', n.x) }}",
    "joins by much": LONG + "{{ n.x|join(n.x) }}",
    "cuts over and over": LONG + 2 * TURNS + "{% set y = n.x[1:] %}" + 2 * "{% endfor %}",
    "compares over and over": LONG + 2 * TURNS + "{% if n.x == n.x ~ 'a' %}{% endif %}" + 2 * "{% endfor %}",
    "writes over and over": LONG + 2 * TURNS + "{{ n.x }}" + 2 * "{% endfor %}",
    "splits over and over": LONG + 2 * TURNS + "{% set y = n.x.split('a') %}" + 2 * "{% endfor %}",
    "joins very much at once": "{% set x = " + " ~ ".join(["messages[0].content"] * 9999) + " %}",
    "includes": "{% include 'a' %}",
    "is very long": "a" * (MAX_SOURCE + 1) + "{{ 1 }}",
}


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a Space; with a smaller purse, as nobody wants to wait until it is empty."""
    stock = chat_template_utils.ImmutableSandboxedEnvironment
    monkeypatch.setattr(template_costs, "STEPS", 200_000)
    chat_template_utils._compile_jinja_template.cache_clear()
    templates.install()
    yield
    chat_template_utils.ImmutableSandboxedEnvironment = stock
    chat_template_utils._compile_jinja_template.cache_clear()


def rendered(template: str, messages: list[Any], tools: list[Any] | None = None) -> str:
    """As vLLM has it done."""
    words = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "?", "pad_token": "_"}
    texts, _ = render_jinja_template(
        [messages], tools=tools, chat_template=template, add_generation_prompt=True, **words
    )
    return str(texts[0])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_does_too_much_is_refused_with_a_sentence(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        jinja2.TemplateError, match=r"^the run's chat template is not rendered, as .*simpler one$"
    ):
        rendered(HOSTILE[name], [USER])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < PEAK


def test_what_a_template_does_is_paid_anew_in_each_render() -> None:
    template = "{% for i in range(5000) %}{{ i }}{% endfor %}"
    assert len({rendered(template, [USER]) for _ in range(20)}) == 1


def test_a_namespace_that_holds_itself_is_written_as_what_it_is() -> None:
    assert rendered("{% set n = namespace() %}{% set n.x = n %}{{ n }}{{ n.x }}", [USER]) == 2 * "<namespace>"


def test_a_thousand_messages_are_few() -> None:
    template = "".join(path.read_text() for path in Path("trainer/policies/wordle-tiny").glob("*.jinja"))
    assert rendered(template, [USER] * 1000).count("hello") == 1000


@pytest.mark.full
def test_templates_that_are_in_use_are_rendered_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that TRL and vLLM ship."""
    monkeypatch.setattr(template_costs, "STEPS", STEPS)
    packages = Path(jinja2.__file__).parents[1]
    places = ("trl/chat_templates", "vllm/transformers_utils/chat_templates")
    sources = [path for place in places for path in sorted((packages / place).glob("*.jinja"))]
    assert len(sources) > 70
    ours = {path: outcome(path.read_text()) for path in sources}
    monkeypatch.setattr(
        chat_template_utils, "ImmutableSandboxedEnvironment", jinja2.sandbox.ImmutableSandboxedEnvironment
    )
    chat_template_utils._compile_jinja_template.cache_clear()
    assert {path: outcome(path.read_text()) for path in sources} == ours


def outcome(template: str) -> list[str]:
    """What it makes of two conversations, or why it does not take one."""
    found = []
    for messages, tools in ((CONVERSATION, TOOLS), ([USER], None)):
        try:
            found.append(rendered(template, messages, tools))
        except (jinja2.TemplateError, TypeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_that_is_too_long_to_be_read_starts_no_vllm(tmp_path: Path, place: str) -> None:
    template = "a" * (MAX_SOURCE + 1)
    (tmp_path / "config.json").write_text("{}")
    templates.require_short(tmp_path)
    text = json.dumps({"chat_template": template}) if place.endswith("json") else template
    (tmp_path / place).write_text(text)
    with pytest.raises(EngineError, match=f"the chat template in {place} has .* publish a simpler one"):
        templates.require_short(tmp_path)
