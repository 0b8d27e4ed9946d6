import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.job.prompt.prompt_template import PromptTemplate
from jaxpaged.job.prompt.row_fault import RowFault
from jaxpaged.model import sandbox


def render(source: str, **cells: object) -> str:
    return PromptTemplate(source, key="input.prompt").render(cells)


def test_cells_are_written_as_they_are():
    assert render("Q: {{ q }}\n", q=" a\n") == "Q:  a\n\n"
    assert render("{{ n + 1 }} {{ x }}", n=1, x=0.5) == "2 0.5"
    assert render("{{ choices | join(', ') }}", choices=["a", "b"]) == "a, b"
    assert render("{{ s.k[1] }} {{ s | tojson }}", s={"k": ["<a>", "é"]}) == 'é {"k": ["<a>", "é"]}'


@pytest.mark.parametrize("text", ["{{ 7*7 }}", "{% for i in x %}", "{# a #}", "None", "&<>'\""])
def test_row_text_is_never_a_template_and_never_escaped(text):
    assert render("{{ q }}{{ q }}", q=text) == text * 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ q }}",
        "{{ 'a' ~ q }}",
        "{{ q | string }}",
        "{{ '%s' | format(q) }}",
        "{{ s.inner }}",
        "{{ [q] | join }}",
        "{{ s }}",
        "{{ 'x %s' % q }}",
        "{{ q + 1 }}",
        "{{ 1 - q }}",
        "{{ q.upper() }}",
        "{{ q.k }}",
        "{{ q['k'][0] }}",
        "{{ q | length }}",
        "{{ q | int }}",
        "{% for x in q %}{% endfor %}",
        "{% if q > 1 %}{% endif %}",
    ],
)
def test_a_null_never_becomes_text_and_its_column_is_named(source):
    reason = r"^null_prompt: input.prompt would write a null of column '[qs]'$"
    with pytest.raises(RowFault, match=reason):
        render(source, q=None, s={"inner": None})


def test_the_literal_none_is_no_text_either():
    with pytest.raises(RowFault, match=r"^null_prompt: input.prompt would write a null$"):
        render("{{ none }}")


def test_a_null_can_be_asked_for():
    source = "{% if hint %}Hint: {{ hint }}{% else %}none{% endif %}"

    assert render(source, hint=None) == "none"
    assert render(source, hint="a") == "Hint: a"
    assert render("{{ q or 'nothing' }}", q=None) == "nothing"
    assert render("{{ q is none }} {{ q == none }}", q=None) == "True True"
    assert render("{{ s | tojson }}", s=[None]) == "[null]"
    assert render("{% if q.k == 'a' %}yes{% else %}no{% endif %}", q=None) == "no"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ s.missing }}", r"has no attribute 'missing'"),
        ("{{ q[0][0].x }}", r"has no attribute 'x'"),
        ("{{ 1 // n }}", r"input.prompt: ZeroDivisionError"),
        ("{{ q + 1 }}", r"input.prompt: TypeError"),
        ("{{ ''.__class__.__mro__ }}", r"unsafe"),
        ("{{ ''.format.__func__.__globals__ }}", r"__func__"),
        ("{% set _ = s.update({'a': 1}) %}", r"attribute 'update' of 'dict' object is unsafe"),
    ],
)
def test_a_template_that_fails_spoils_its_row_and_quotes_no_text(source, reason):
    with pytest.raises(RowFault, match=f"template_error: .*{reason}") as caught:
        render(source, q="secret text", n=0, s={"k": "v"})

    assert "secret" not in caught.value.reason


def test_a_template_cannot_write_without_bound():
    with pytest.raises(RowFault, match=r"prompt_too_long: input.prompt renders to more than"):
        render("{% for i in range(100000) %}{{ q }}{% endfor %}", q="x" * 1000)


def test_randomness_and_other_templates_are_not_available():
    with pytest.raises(ConfigError, match=r"line 1 .*random"):
        render("{{ [1, 2] | random }}")
    with pytest.raises(ConfigError, match="include, import and extends are not available"):
        render("{% import 'a' as b %}")
    assert "lipsum" in PromptTemplate("{{ lipsum() }}", key="k").names


def test_one_line_says_what_is_unknown():
    with pytest.raises(ConfigError) as caught:
        render("a\n{{ q | nofilter }}", q="a")

    assert str(caught.value) == "input.prompt: line 2 of the template: No filter named 'nofilter'."


def test_one_row_cannot_exhaust_the_memory():
    with pytest.raises(RowFault, match=r"template_error: input.prompt: the result of \* is too"):
        render("{{ 'x' * n }}", n=10**12)


def marked(source: str, **cells: object) -> str:
    """Rendered with a mark in front of every `!` of data."""
    template = PromptTemplate(
        source,
        key="k",
        protect=lambda text: text.replace("!", "^!"),
        unprotect=lambda text: text.replace("^!", "!"),
    )
    return template.render(cells)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("! {{ a }}", "! x^!"),
        ("{{ b }}", "['x^!']"),
        ("{{ b[0] }} {{ c.d }}", "x^! x^!"),
        ("{{ '!' }}", "^!"),
        ("{{ b | tojson }}", '["x^!"]'),
        ("{{ a | length }} {{ a[-1:] }} {{ a ~ a }}", "2 ^! x^!x^!"),
        ("{% if a == 'x!' and a in ['x!'] %}same{% endif %}", "same"),
        ("{{ {'x!': 'found'}[a] }}", "found"),
        ("{% macro m(t) %}!{{ t }}{% endmacro %}{{ m(a) }}", "!x^!"),
        ("{% macro m(t) %}!{{ t }}{% endmacro %}{{ m(m(a)) }}", "!!x^!"),
        ("{% macro m(t) %}!{{ t }}{% endmacro %}{{ m(a) | upper }}", "^!X^!"),
        ("{% macro m(t) %}!{{ t }}{% endmacro %}{{ m(a)|length }}", "3"),
        ("{% set t %}!{{ a }}{% endset %}{{ t }} {{ t == '!x!' }}", "!x^! True"),
        ("{% set t | upper %}{{ a }}{% endset %}{{ t }}", "X^!"),
        ("{% for x in [1, [2]] recursive %}!{{ a }}{% endfor %}", "!x^!!x^!"),
        (
            "{% for x in e recursive %}!{{ x.d }}{{ loop(x.e) if x.e else '' }}{% endfor %}",
            "!1^!!2^!",
        ),
        ("{% block b %}!{{ a }}{% endblock %}{{ self.b() }}", "!x^!!x^!"),
    ],
)
def test_templates_see_cells_as_they_are_and_data_is_protected_once(source, text):
    tree = [{"d": "1!", "e": [{"d": "2!", "e": None}]}]

    assert marked(source, a="x!", b=["x!"], c={"d": "x!"}, e=tree) == text


@pytest.mark.parametrize(
    "source",
    [
        "{% filter upper %}{{ a }}{% endfilter %}",
        "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}{{ a }}{% endcall %}",
        "{% autoescape true %}{% for x in b recursive %}{{ x }}{% endfor %}{% endautoescape %}",
    ],
)
def test_blocks_that_would_write_unprotected_data_are_refused(source):
    with pytest.raises(ConfigError, match="k: the blocks filter, call and autoescape are not"):
        marked(source, a="x!")


def test_the_cap_on_output_is_that_of_the_docs():
    assert sandbox.MAX_OUTPUT_CHARS == 16_000_000
