"""No template takes more than so many steps and bytes, whatever it is made of.

Each bomb runs in a process of its own with little memory; a passing test is one that came back.
"""

import json
import subprocess
import sys

import jinja2.filters
import jinja2.tests
import pytest

from jaxpaged.model import metered_calls, sandbox
from jaxpaged.model.chat_template import ChatTemplate, TemplateError

# Doubling needs few turns; the budget's words are the same for all.
_GROW = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set ns.x = %s %%}{%% endfor %%}"
)
_NEST = _GROW.replace("99", "99999")
_BIG = "('a' * 9000000)"

LOOPS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "{% macro f(n) %}{{ caller() }}{% if n %}{% call f(n - 1) %}a{% endcall %}"
    "{% call f(n - 1) %}a{% endcall %}{% endif %}{% endmacro %}{% call f(99) %}a{% endcall %}",
    "{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "{% for a in range(99999) %}{{ range(99999) | map('string') | join }}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999) | select('odd') | list | length }}{% endfor %}",
    "{% for a in range(99999) %}{{ (range(99999) | list).count(-1) }}{% endfor %}",
    f"{{% for a in range(99999) %}}{{{{ {_BIG}.count('b') }}}}{{% endfor %}}",
    f"{{% set x = {_BIG} %}}{{% for a in range(99999) %}}{{{{ 'b' in x }}}}{{% endfor %}}",
]

GROWTH = [
    _GROW % ("'a'", "ns.x ~ ns.x"),
    _GROW % ("'a'", "ns.x + ns.x"),
    _GROW % ("'a'", "'%s%s' % (ns.x, ns.x)"),
    _GROW % ("'a'", "'%(a)s%(a)s' % {'a': ns.x}"),
    _GROW % ("'a'", "'{0}{0}'.format(ns.x)"),
    _GROW % ("'a'", "'{a}{a}'.format_map({'a': ns.x})"),
    _GROW % ("'a'", "'%s%s' | format(ns.x, ns.x)"),
    _GROW % ("'a'", "[ns.x, ns.x] | join"),
    _GROW % ("'a'", "''.join([ns.x, ns.x])"),
    _GROW % ("'a'", "ns.x | replace('a', 'aa')"),
    _GROW % ("'a'", "ns.x.replace('', 'a')"),
    _GROW % ("'&'", "(ns.x | forceescape) ~ ns.x"),
    _GROW % ("[0]", "ns.x + ns.x"),
    _GROW % ("[0]", "[ns.x, ns.x] | sum(start=[])"),
    _GROW % ("3", "ns.x * ns.x"),
    _GROW % ("3", "ns.x ** 9"),
    # Small in memory, endless as text or beside another.
    _GROW % ("[0]", "[ns.x, ns.x]") + "{{ ns.x }}",
    _GROW % ("[0]", "[ns.x, ns.x]") + "{{ ns }}",
    _GROW % ("[0]", "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    _GROW % ("[0]", "[ns.x, ns.x]") + "{{ ns.x | string }}",
    _GROW % ("[0]", "[ns.x, ns.x]") + "{{ ns.x ~ '' }}",
    _GROW % ("[0]", "[ns.x, ns.x]") + "{{ '%r' % ns.x }}",
    _GROW % ("[0]", "[ns.x, ns.x]") + "{{ '{}'.format(ns.x) }}",
    _GROW % ("[0]", "[ns.x, ns.x]") + "{{ ns.x is lower }}",
    _GROW % ("[0]", "[ns.x, ns.x]") + "{{ ns.x[0] == ns.x[1] }}",
    _GROW % ("[0]", "[ns.x, ns.x]") + "{{ ns.x is eq(ns.x[0]) }}",
    _GROW % ("[0]", "[ns.x, ns.x]") + "{{ [ns.x[0]] | select('eq', ns.x[1]) | list }}",
    _GROW % ("[0]", "[ns.x, ns.x]") + "{{ ns.x | sort }}",
    _GROW % ("[0]", "[ns.x, ns.x]") + "{{ [ns.x].index(ns.x[0]) }}",
    _GROW % ("[0]", "[ns.x, ns.x]") + "{{ raise_exception(ns.x) }}",
    _GROW % ("{}", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x.values() }}",
    # Nested so deeply that C's own stack ends.
    _NEST % ("()", "(ns.x,)") + "{{ {ns.x: 1} }}",
    _NEST % ("()", "(ns.x,)") + "{{ {}[ns.x] }}",
    _NEST % ("()", "(ns.x,)") + "{{ {}.get(ns.x) }}",
    _NEST % ("()", "(ns.x,)") + "{{ [ns.x] | unique | list }}",
    _NEST % ("()", "(ns.x,)") + "{{ ns.x is filter }}",
    # Much memory in many pieces, none of them large.
    _NEST % ("[]", "ns.x + [('a' * 1000000)[1:]]"),
    _NEST % ("[]", "ns.x + [('a' * 1000000) | trim('b')]"),
    "{% set x %}{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}",
    "{% set x %}{% for i in range(99999) %}" + "a" * 100_000 + "{% endfor %}{% endset %}",
]

AT_ONCE = [
    "{{ 'a' * 10**9 }}",
    "{{ [0] * 10**9 }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.rjust(10**9) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ '\\t'.expandtabs(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' % 1.5 }}",
    "{{ '%(a(b))1000000000d' % {'a(b)': 1} }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%.*f' % (10**9, 1.5) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '%1000000000d' is odd }}",
    "{{ '%1000000000d' is divisibleby(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**9) }}",
    "{{ '{a:.1000000000f}'.format_map({'a': 1.5}) }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a\\nb' | indent(10**9) }}",
    "{{ 'a\\nb' | indent('a' * 9000000, true) }}",
    "{{ [1] | tojson(indent=10**9) }}",
    "{{ [1] | tojson(separators=('a' * 9000000, ':')) }}",
    "{{ [1] | batch(10**9, 0) | list }}",
    "{{ [1] | slice(10**9, 0) | list }}",
    "{{ ['a'] | map('center', 10**9) | list }}",
    "{{ 1.5 | round(10**9, 'ceil') }}",
    f"{{{{ {_BIG}.join(['a', 'b', 'c']) }}}}",
    f"{{{{ ['a', 'b', 'c'] | join({_BIG}) }}}}",
    f"{{{{ {_BIG}.replace('a', 'bbb') }}}}",
    f"{{{{ {_BIG} | replace('a', 'bbb') }}}}",
    f"{{{{ {_BIG} | list }}}}",
    f"{{{{ 'a'.join(({_BIG}, {_BIG})) }}}}",
    "{{ range(10**8) | list }}",
    "{{ 2 ** (10 ** 9) }}",
    "{{ strftime_now('%c' * 4000000) }}",
    "{{ 7 ** 1000 ** 10 }}",
    "{{ 'aaa' | truncate(9000001, true, 'a' * 9000000, 0) ~ 'a' * 16000000 }}",
]

MISSING = [
    "{{ (5).to_bytes(10**9) }}",
    "{{ 'a'.encode() }}",
    "{{ 'a'.translate({97: 'a' * 1000}) }}",
    "{{ ('a' | attr('encode'))() }}",
    "{{ lipsum(10**9) }}",
    *(f"{{{{ 'a' | {name} }}}}" for name in metered_calls.MISSING_FILTERS),
]

CHILD = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from jaxpaged.model.chat_template import ChatTemplate, TemplateError
for source in json.load(sys.stdin):
    try:
        text = ChatTemplate(source, bos_token=None, eos_token=None).render([])
        print(json.dumps("wrote " + str(len(text))), flush=True)
    except TemplateError as error:
        print(json.dumps(str(error)), flush=True)
"""

# How often a template writes before its budget is spent, twice.
COUNTING_CHILD = """
import jinja2
from jaxpaged.model import sandbox
source = "{% for a in range(9999) %}{{ a }}{% for b in range(9999) %}{% endfor %}{% endfor %}"
for _ in range(2):
    kept = []
    with sandbox.bounded():
        try:
            for piece in sandbox.Environment().from_string(source).generate():
                kept.append(piece)
        except jinja2.exceptions.SecurityError:
            pass
    print(len(kept))
"""

REFUSALS = (
    "too large",
    "more than",
    "too big",
    "recursion",
    "from a value",
    "a test of numbers",
)


def outcomes(sources: list[str]) -> dict[str, str]:
    """What became of each template in a process that may have 1 GiB of address space."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(sources), capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    return dict(zip(sources, map(json.loads, child.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("bombs", [LOOPS, GROWTH, AT_ONCE], ids=["loops", "growth", "at once"])
def test_what_a_template_costs_is_bounded(bombs):
    for source, outcome in outcomes(bombs).items():
        assert any(words in outcome for words in REFUSALS), (source, outcome)
        # The budget spoke, and not the memory.
        assert "MemoryError" not in outcome, source


@pytest.mark.parametrize("source", MISSING)
def test_what_cannot_be_bounded_is_not_there(source):
    with pytest.raises(TemplateError, match=r"unsafe|undefined|No filter named"):
        ChatTemplate(source, bos_token=None, eos_token=None).render([])


def test_every_filter_and_test_of_jinja_was_looked_at():
    """A new version of Jinja must not bring one in that nobody thought of."""
    environment = sandbox.Environment()
    known = set(jinja2.filters.FILTERS) - set(metered_calls.MISSING_FILTERS)
    assert {name for name in environment.filters if not name.startswith("(")} == known
    for name in known:
        assert hasattr(environment.filters[name], "__wrapped__"), name
    assert set(environment.tests) == set(jinja2.tests.TESTS)
    assert set(environment.globals) == {"cycler", "dict", "joiner", "namespace", "range"}


def test_cost_is_the_same_each_time():
    counts = subprocess.run(
        [sys.executable, "-c", COUNTING_CHILD], capture_output=True, text=True, check=True
    ).stdout.split()

    assert len(counts) == 2
    assert counts[0] == counts[1]
    assert 10 < int(counts[0]) < 9999


def test_a_budget_is_of_one_run():
    template = ChatTemplate(
        "{% for a in range(90000) %}{{ 'a' * 100 }}{% endfor %}", bos_token=None, eos_token=None
    )
    for _ in range(2):
        assert len(template.render([])) == 9_000_000


def test_long_chats_stay_far_below_the_bounds():
    source = (
        "{% for message in messages %}{% if message['role'] == 'assistant' and '</think>' in "
        "message.content %}{% set text = message.content.split('</think>')[-1].lstrip('\\n') %}"
        "{% else %}{% set text = message.content %}{% endif %}<|im_start|>{{ message.role ~ '\\n' "
        "~ text | trim }}<|im_end|>{{ '\\n' if not loop.last }}{% endfor %}"
    )
    chat = [{"role": "assistant", "content": "<think>a</think>\n" + "word " * 80}] * 2000
    text = ChatTemplate(source, bos_token=None, eos_token=None).render(chat)
    assert text.count("<|im_start|>assistant\nword word") == 2000
    whole = [{"role": "user", "content": "é" * 4_000_000}]
    assert len(ChatTemplate(source, bos_token=None, eos_token=None).render(whole)) > 4_000_000


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '%5.1f|%-4s|%%' % (1.25, 'a') }}", "  1.2|a   |%"),
        ("{{ '%(a)s' % {'a': 1} }}", "1"),
        ("{{ '{:>4}|{a}'.format(1, a='b') }}", "   1|b"),
        ("{{ 'a b'.split() | join('-') }}", "a-b"),
        ("{{ 'a,b,c'.split(',', 1) }}", "['a', 'b,c']"),
        ("{{ 'a'.center(5, '*') }}{{ 'a' | center(3) }}|", "**a** a |"),
        ("{{ [1, 2] | sum }}{{ [[1], [2]] | sum(start=[]) }}", "3[1, 2]"),
        ("{{ [{'a': 1}, {'a': 2}] | sum(attribute='a') }}", "3"),
        ("{{ [{'a': 1}, {'a': 2}] | map(attribute='a') | join(',') }}", "1,2"),
        ("{{ ['b', 'a'] | sort }}{{ 'ab' | list }}{{ 'ab' | reverse }}", "['a', 'b']['a', 'b']ba"),
        ("{{ {'a': [1]} | tojson(indent=1) }}", '{\n "a": [\n  1\n ]\n}'),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ [1, 2, 3][1:] }}{{ 'abc'[::-1] }}", "[2, 3]cba"),
        ("{{ 1 < 2 < 3 }}{{ [1] == [1] }}{{ 'a' in {'a': 1} }}", "TrueTrueTrue"),
        ("{% for x in [1, 2, 3] if x != 2 %}{{ x }}/{{ loop.length }} {% endfor %}", "1/2 3/2 "),
        ("{% macro m(a, b='x') %}{{ a ~ b }}{% endmacro %}{{ m('y') }}{{ m('y', 'z') }}", "yxyz"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}", "A1"),
        ("{% filter upper %}a{% endfilter %}", "A"),
        ("{% for a in [[1, [2]], 3] recursive %}{{ loop(a) if a is sequence else a }}{% endfor %}",
         "123"),
        ("{{ 4 is divisibleby 2 }}{{ 3 is odd }}{{ 'A' is upper }}", "TrueTrueTrue"),
        ("{{ 1.256 | round(2) }}{{ 3.7 | int }}", "1.263"),
        ("{{ '<a>' | e }}{{ ('<a>' | e) + '<' }}", "&lt;a&gt;&lt;a&gt;&lt;"),
    ],
)  # fmt: skip
def test_what_is_bounded_works_as_before(source, expected):
    template = ChatTemplate(source, bos_token=None, eos_token=None)
    assert template.render([]) == expected


@pytest.mark.parametrize(
    "source", ["{{ [1] | join(2, 3, 4) }}", "{{ 'a'.ljust('b') }}", "{{ 'a' | center('b') }}"]
)
def test_calls_with_wrong_arguments_fail_by_themselves(source):
    with pytest.raises(TemplateError, match=r"argument|not supported|interpreted"):
        ChatTemplate(source, bos_token=None, eos_token=None).render([])
