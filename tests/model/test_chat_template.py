"""Chat templates behave as in transformers, inside a sandbox."""

import json

import pytest

from jaxpaged.model.chat_template import ChatTemplate, TemplateError
from jaxpaged.model.sandbox import MAX_OUTPUT_CHARS

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict] | None = None) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    return template.render(USER if messages is None else messages)


def test_every_golden_rendering_of_transformers(golden):
    for case in json.loads((golden / "chat_templates.json").read_text()):
        template = ChatTemplate(case["template"], bos_token="<|im_start|>", eos_token="<|im_end|>")
        text = template.render(
            case["messages"], add_generation_prompt=case["add_generation_prompt"]
        )
        assert text == case["text"], case["name"]


def test_special_tokens_are_variables():
    template = ChatTemplate(
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}",
        bos_token=None,
        eos_token="</s>",
        more_tokens={"pad_token": "<pad>"},
    )
    assert template.render(USER) == "|</s>|<pad>"


def test_generation_prompt_can_be_left_out():
    template = ChatTemplate(
        "x{% if add_generation_prompt %}>{% endif %}", bos_token=None, eos_token=None
    )
    assert template.render(USER) == "x>"
    assert template.render(USER, add_generation_prompt=False) == "x"


def test_json_is_not_escaped_for_html():
    assert render("{{ messages | tojson }}", [{"content": "<b> & é"}]) == '[{"content": "<b> & é"}]'


def test_date_is_that_of_the_template_for_all_rows():
    template = ChatTemplate("{{ strftime_now('%H:%M:%S.%f') }}", bos_token=None, eos_token=None)
    assert template.render(USER) == template.render(USER)


def test_row_text_is_never_rendered_again():
    content = "{{ 7 * 7 }}{% raw %}"
    assert render("{{ messages[0].content }}", [{"content": content}]) == content


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "hi"}], "hi"),
        ([{"role": "system", "content": "s"}, *USER], None),
        ([*USER, *USER], None),
    ],
)
def test_refusal_of_a_template_carries_its_own_message(messages, expected):
    source = (
        "{% if messages | length > 1 %}{{ raise_exception('Only one user turn, please!') }}"
        "{% endif %}{{ messages[0].content }}"
    )
    if expected is not None:
        assert render(source, messages) == expected
        return
    with pytest.raises(TemplateError, match=r"^Only one user turn, please!$"):
        render(source, messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].nothing.at.all }}", "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ messages | nofilter }}", "No filter named 'nofilter'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ (messages[0] | tojson)('x') }}", "not callable"),
        ("{{ cycler() }}", "at least one item"),
        ("{{ 1e400 | int }}", "inf"),
    ],
)
def test_failure_inside_a_template_is_a_template_error(source, message):
    with pytest.raises(TemplateError, match=message):
        render(source)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% unknown %}", "{% include 'x' %}", "{% break %}"]
)
def test_malformed_template_is_refused(source):
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__self__.year }}",
    ],
)
def test_sandbox_holds(source):
    with pytest.raises(TemplateError, match=r"unsafe|not callable|undefined|has no attribute"):
        render(source)


def test_messages_of_the_caller_are_not_changed():
    messages = [{"role": "user", "content": "hi"}]
    render("{% set m = messages[0] %}{{ m.content }}", messages)
    assert messages == USER


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 10**9 * 'ab' }}",
        "{{ 2 ** 1000000000 }}",
        "{{ (-3) ** 1000000000 }}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ range(10**8) | list }}",
    ],
)
def test_cost_is_bounded(source):
    with pytest.raises(TemplateError, match=r"too large|more than|too big"):
        render(source)


def test_small_powers_and_repetitions_work():
    assert render("{{ '-' * 3 }}{{ 2 ** 10 }}{{ 0.5 ** 2 }}{{ 3 * 4 }}") == "---10240.2512"


def test_template_beyond_the_size_cap_is_refused():
    with pytest.raises(TemplateError, match="has 1000001 characters; the most is 1000000"):
        ChatTemplate("a" * 1_000_001, bos_token=None, eos_token=None)


def test_error_messages_are_bounded():
    with pytest.raises(TemplateError) as caught:
        render("{{ raise_exception('a' * 100000) }}")
    assert len(str(caught.value)) < 600


def test_output_up_to_the_cap_is_allowed():
    assert len(render("{{ 'a' * 1000000 }}")) == 1_000_000 < MAX_OUTPUT_CHARS
