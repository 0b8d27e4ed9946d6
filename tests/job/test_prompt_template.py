import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.job import prompt_template
from jaxpaged.job.prompt_template import PromptTemplate
from jaxpaged.job.row_fault import RowFault


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
        "{{ none }}",
    ],
)
def test_a_null_never_becomes_text(source):
    with pytest.raises(RowFault, match=r"null_prompt: input.prompt would write a null"):
        render(source, q=None, s={"inner": None})


def test_a_null_can_be_asked_for():
    source = "{% if hint %}Hint: {{ hint }}{% else %}none{% endif %}"

    assert render(source, hint=None) == "none"
    assert render(source, hint="a") == "Hint: a"
    assert render("{{ q or 'nothing' }}", q=None) == "nothing"
    assert render("{{ q is none }} {{ q == none }}", q=None) == "True True"
    assert render("{{ s | tojson }}", s=[None]) == "[null]"


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


def test_protection_covers_nested_text_and_survives_printing_a_list():
    template = PromptTemplate(
        "{{ a }} {{ b[0] }} {{ c.d }} {{ b }}",
        key="k",
        protect=lambda text: text.replace("!", "\ufdd0!"),
        unprotect=lambda text: text.replace("\ufdd0", ""),
    )

    text = template.render({"a": "!", "b": ["!"], "c": {"d": "!"}})

    assert text == "\ufdd0! \ufdd0! \ufdd0! ['\ufdd0!']"


def test_the_cap_on_output_is_that_of_the_docs():
    assert prompt_template.MAX_CHARS == 16_000_000
