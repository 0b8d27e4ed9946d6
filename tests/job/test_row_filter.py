import datetime
import decimal
import itertools

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpaged.errors import ConfigError
from jaxpaged.job.filter.row_filter import RowFilter
from jaxpaged.job.result_columns import RESULT_FIELDS, ROW_TYPE

NAN, INF = float("nan"), float("inf")
NUM_ROWS = 40

TEXTS = [
    "length", None, "stop", "", "a", "A", "ab", "o'clock", "ä", "a%b", "a_b", "a\\b", "a\nb", "aäb",
    "\U0001f600", "axb", "Length ", "--", "zz", ";",
]  # fmt: skip
SMALL = [0, 1, None, -1, 48, 127, -128, 47, 5]
BIG = [0, 2**53, 2**53 + 1, None, 2**63 - 1, -(2**63), -1, 48]
DOUBLES = [0.0, -0.0, None, NAN, INF, -INF, 0.1, -1.5, 48.0, 1e300, 2.0**53]
SINGLES = [0.0, NAN, None, 0.1, 16777216.0, -INF, 1.5, 48.0]
DECIMALS = [decimal.Decimal(text) for text in ("0.00", "1.25", "-1.25", "999.99", "48.00", "0.01")]
DAYS = [datetime.date(2024, 2, 29), None, datetime.date(1969, 12, 31), datetime.date(2026, 1, 1)]
MOMENTS = [
    datetime.datetime(2024, 2, 29, 12, 30, 15, 123456), None,
    datetime.datetime(2024, 2, 29), datetime.datetime(1969, 12, 31, 23, 59, 59, 999999),
]  # fmt: skip


def cells(values, kind=None):
    return pa.array(list(itertools.islice(itertools.cycle(values), NUM_ROWS)), kind)


def address(files, indices):
    """A struct with nulls of its own over fields that have values and nulls."""
    arrays = [
        cells(files, pa.string()),
        cells([0, 1, None], pa.int32()),
        cells(indices, pa.int64()),
    ]
    gone = pa.array([position % 7 == 3 for position in range(NUM_ROWS)])
    return pa.StructArray.from_arrays(arrays, fields=list(ROW_TYPE), mask=gone)


TABLE = pa.table({
    "finish_reason": cells(TEXTS, pa.string()),
    "completion": cells(TEXTS[::-1], pa.large_string()),
    "seen": cells(TEXTS[3:], pa.string_view()),
    "topic": cells(TEXTS[1:]).dictionary_encode(),
    "level": pa.DictionaryArray.from_arrays(cells([0, 1, None, 2], pa.int8()), [3, None, 1]),
    "completion_tokens": cells(SMALL, pa.int32()),
    "tiny": cells(SMALL, pa.int8()),
    "seed": cells(BIG, pa.int64()),
    "unsigned": cells([0, 2**64 - 1, None, 48, 2**63], pa.uint64()),
    "score": cells(DOUBLES, pa.float64()),
    "single": cells(SINGLES, pa.float32()),
    "price": cells([*DECIMALS, None], pa.decimal128(5, 2)),
    "huge": cells([decimal.Decimal(10**37), None, decimal.Decimal(0)], pa.decimal128(38, 0)),
    "score_contains": cells([True, False, None, True], pa.bool_()),
    "a b": cells([None, False, True], pa.bool_()),
    "day": cells(DAYS, pa.date32()),
    "second": cells(MOMENTS, pa.timestamp("us")).cast(pa.timestamp("s"), safe=False),
    "moment": cells(MOMENTS, pa.timestamp("us")),
    "nano": cells(MOMENTS, pa.timestamp("ns")),
    "zoned": cells(MOMENTS, pa.timestamp("us", "UTC")),
    "row": address(["a.parquet", "b.parquet", None], [0, 7, 2**40, None]),
    "token_ids": cells([[1, 2], None, []], pa.list_(pa.int32())),
    "nothing": pa.nulls(NUM_ROWS),
})  # fmt: skip


@pytest.fixture(scope="module")
def database():
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("arrow", TABLE.append_column("n", pa.array(range(NUM_ROWS))))
        connection.execute("CREATE TABLE rows AS SELECT * FROM arrow")
        yield connection


def chosen(text, table=TABLE):
    """The positions of the rows that the filter selects."""
    return np.flatnonzero(RowFilter.parse(text, table.schema).mask(table)).tolist()


def chosen_by_sql(database, text):
    found = database.execute(f"SELECT n FROM rows WHERE {text} ORDER BY n").fetchall()
    return [n for (n,) in found]


def refusal(text, schema=TABLE.schema):
    with pytest.raises(ConfigError) as caught:
        RowFilter.parse(text, schema)
    return str(caught.value)


COMPARISONS = ["=", "==", "<>", "!=", "<", "<=", ">", ">="]
NUMBERS = [
    "0", "-0", "1", "48", "48.0", "47.5", "-1.5", ".5", "5.", "127", "128", "-128", "-129", "0.1",
    "1.25", "1.255", "999.99", "1000", "-1000.001", "9007199254740993", "9223372036854775807",
    "9223372036854775808", "-9223372036854775809", "18446744073709551616", "16777216",
    "0.01",
]  # fmt: skip
QUOTED = ["'{}'".format(text.replace("'", "''")) for text in TEXTS if text is not None]
PATTERNS = [
    "%",
    "",
    "_",
    "__",
    "a%",
    "%b",
    "a_b",
    "a%b",
    "%a%",
    "a\\%b",
    "a\\_b",
    "%''%",
    "L%",
    "[a]",
]
ISO_DAYS = ["2024-02-29", "1969-12-31", "2023-01-01", "0001-01-01", "9999-12-31"]
ISO_TIMES = [
    "2024-02-29", "2024-02-29 12:30", "2024-02-29T12:30:15", "2024-02-29 12:30:15.123456",
    "2024-02-29 12:30:15.5", "1969-12-31 23:59:59.999999", "1969-12-31",
]  # fmt: skip

# By kind: the columns of it, their literals, and the comparisons that fit.
KINDS = {
    "text": (["finish_reason", "completion", "seen", "topic", "row.file"], QUOTED, COMPARISONS),
    "number": (
        ["completion_tokens", "tiny", "seed", "unsigned", "score", "single", "price", "level",
         "row.index", '"row"."row_group"'],
        NUMBERS,
        COMPARISONS,
    ),
    "truth": (["score_contains", '"a b"'], ["TRUE", "false"], COMPARISONS[:4]),
    "day": (["day"], [f"'{day}'" for day in ISO_DAYS], COMPARISONS),
    "time": (["moment", "nano"], [f"'{time}'" for time in ISO_TIMES], COMPARISONS),
}  # fmt: skip


@st.composite
def conditions(draw):
    columns, literals, comparisons = KINDS[draw(st.sampled_from(sorted(KINDS)))]
    column, literal = draw(st.sampled_from(columns)), st.sampled_from(literals)
    shapes = ["compare", "null", "in"]
    shapes += ["like"] if literals is QUOTED else ["bare"] if "TRUE" in literals else []
    negation = draw(st.sampled_from(["", "NOT "]))
    match draw(st.sampled_from(shapes)):
        case "compare":
            return f"{column} {draw(st.sampled_from(comparisons))} {draw(literal)}"
        case "null":
            return f"{column} is {negation}null"
        case "in":
            listed = ", ".join(draw(st.lists(literal, min_size=1, max_size=4)))
            return f"{column} {negation}IN ({listed})"
        case "like":
            return f"{column} {negation}LIKE '{draw(st.sampled_from(PATTERNS))}'"
    return column


def grown(inner):
    return st.one_of(
        inner.map(lambda one: f"NOT {one}" if " " not in one else f"NOT ({one})"),
        st.tuples(inner, st.sampled_from([" AND ", " or "]), inner).map("".join),
        inner.map(lambda one: f"({one})"),
    )


FILTERS = st.recursive(conditions(), grown, max_leaves=8)


@settings(max_examples=400, deadline=None)
@given(text=FILTERS)
@example("finish_reason = 'length' AND completion_tokens >= 48")
@example("NOT score_contains")
@example('NOT NOT score_contains OR NOT "a b" AND completion_tokens <> 48')
@example("NOT (score > 5)")
@example("seed <= 9007199254740992.5")
def test_it_selects_what_sql_selects(database, text):
    assert chosen(text) == chosen_by_sql(database, text)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_column_literal_and_comparison_is_as_in_sql(database, kind):
    columns, literals, comparisons = KINDS[kind]
    # Expressions are compared, not conditions: unknown is not the same as false.
    for column in columns:
        texts = [f"{column} {sign} {literal}" for sign in comparisons for literal in literals]
        asked = ", ".join(f"({text}) AS c{i}, NOT ({text})" for i, text in enumerate(texts))
        rows = database.execute(f"SELECT {asked} FROM rows ORDER BY n").fetchall()
        for i, answers in enumerate(zip(*rows, strict=True)):
            text = texts[i // 2] if i % 2 == 0 else f"NOT {texts[i // 2]}"
            wanted = [position for position, answer in enumerate(answers) if answer]
            assert chosen(text) == wanted, text


@pytest.mark.parametrize("column", ["finish_reason", "completion", "seen", "topic", "row.file"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_in_sql(database, column, pattern):
    for text in (f"{column} LIKE '{pattern}'", f"{column} NOT LIKE '{pattern}'"):
        assert chosen(text) == chosen_by_sql(database, text)


@pytest.mark.parametrize("column", [name for name in TABLE.schema.names if name != "a b"])
def test_every_type_can_be_null(database, column):
    for text in (f'"{column}" IS NULL', f'"{column}" is not null'):
        assert chosen(text) == chosen_by_sql(database, text)
    assert chosen(f"{column} IS NULL") == [
        position for position, cell in enumerate(TABLE.column(column).to_pylist()) if cell is None
    ]


def test_a_time_with_a_zone_is_the_same_moment_in_every_zone(database):
    for literal in ("2024-02-29T12:30:15.123456Z", "2024-02-29 14:30:15.123456+02:00"):
        for sign in COMPARISONS:
            text = f"zoned {sign} '{literal}'"
            assert chosen(text) == chosen_by_sql(database, text)


def test_a_literal_finer_than_the_column_is_not_rounded():
    seconds = TABLE.column("second").to_pylist()
    found = chosen("second < '2024-02-29 12:30:15.000000001'")

    assert found == [
        i for i, time in enumerate(seconds)
        if time is not None and time <= datetime.datetime(2024, 2, 29, 12, 30, 15)
    ]  # fmt: skip
    assert chosen("second = '2024-02-29 12:30:15.5'") == []
    assert chosen("nano < '9999-12-31'") == chosen("nano IS NOT NULL")


@pytest.mark.parametrize("sign", COMPARISONS)
def test_numbers_of_many_digits_are_exact(database, sign):
    for literal in (f"1{'0' * 37}", f"{'9' * 37}", f"1{'0' * 36}1", f"-{'9' * 38}"):
        text = f"huge {sign} {literal}"
        assert chosen(text) == chosen_by_sql(database, text)
        # SQL makes this a matter of floating point.
        assert chosen(f"price {sign} {literal}") in ([], chosen("price IS NOT NULL"))
        assert chosen(f"score {sign} {literal}") == chosen_by_sql(
            database, f"score {sign} {literal}::double"
        )


@pytest.mark.parametrize("kind", [pa.decimal32(5, 2), pa.decimal64(12, 2), pa.decimal256(70, 2)])
def test_decimals_of_every_width_are_compared_exactly(kind):
    step = decimal.Decimal(f"1e{-kind.scale}")
    table = pa.table({"x": pa.array([step * -2, step, None, step * 7], kind)})

    assert chosen(f"x <= {step * 7:f}", table) == [0, 1, 3]
    assert chosen(f"x < {step * 7:f}", table) == [0, 1]
    assert chosen(f"x = {step:f}", table) == [1]
    assert chosen(f"x <> {step + decimal.Decimal('0.0001'):f}", table) == [0, 1, 3]
    assert chosen(f"x > -{'9' * 38}", table) == [0, 1, 3]


def test_half_precision_is_compared_with_the_value_next_to_the_literal():
    table = pa.table({"x": pa.array([0.1, None, 65504.0, INF, NAN], pa.float16())})

    assert chosen("x = 0.1", table) == [0]
    assert chosen("x < 70000", table) == [0, 2]
    assert chosen("x = 70000", table) == []
    assert chosen("NOT x <= 65504", table) == chosen("x > 65504", table) == [3, 4]


def test_dates_in_milliseconds_are_dates():
    table = pa.table({"x": pa.array(DAYS, pa.date64())})

    assert chosen("x >= '2024-02-29'", table) == [0, 3]
    assert chosen("x <= '2024-02-29'", table) == [0, 2]
    assert chosen("x = '1969-12-31'", table) == [2]


def test_a_column_of_nulls_answers_nothing():
    for text in ("nothing = 'a'", "nothing > 1", "nothing LIKE '%'", "NOT nothing", "nothing"):
        assert chosen(text) == []
    assert chosen("nothing = 1 OR completion_tokens = 48") == chosen("completion_tokens = 48")


def test_the_shipped_columns_can_all_be_named():
    schema = pa.schema(RESULT_FIELDS)
    text = " OR ".join(f"{field.name} IS NULL" for field in schema)

    assert RowFilter.parse(text, schema).columns == tuple(schema.names)


def test_it_says_which_columns_it_needs_and_reads_no_others():
    text = "row.index > 3 AND NOT (finish_reason = 'stop' OR \"a b\") and row.file like '%'"
    found = RowFilter.parse(text, TABLE.schema)

    assert (found.text, found.columns) == (text, ("row", "finish_reason", "a b"))
    narrow = TABLE.select(list(found.columns))
    assert found.mask(narrow).tolist() == found.mask(TABLE).tolist()


def test_tables_batches_slices_and_no_rows_are_all_answered():
    found = RowFilter.parse("topic <> 'a' AND level <= 3", TABLE.schema)
    wanted = found.mask(TABLE)
    chunks = pa.concat_tables([TABLE.slice(0, 7), TABLE.slice(7, 0), TABLE.slice(7)])

    assert wanted.any()
    assert wanted.dtype == np.bool_
    assert found.mask(chunks).tolist() == wanted.tolist()
    assert found.mask(TABLE.slice(5, 9)).tolist() == wanted[5:14].tolist()
    assert found.mask(TABLE.to_batches()[0].slice(5, 9)).tolist() == wanted[5:14].tolist()
    assert found.mask(TABLE.schema.empty_table()).tolist() == []
    assert found.mask(pa.Table.from_batches([], TABLE.schema)).dtype == np.bool_


def test_rows_read_in_another_spelling_of_their_type_are_answered_alike():
    found = RowFilter.parse("topic = 'a'", TABLE.schema)
    plain = TABLE.select(["topic"]).cast(pa.schema([("topic", pa.string())]))

    assert found.mask(plain).tolist() == found.mask(TABLE).tolist()


def test_names_in_quotes_are_names():
    table = pa.table({"b.c": [1, 2], 'say "x"': [1, 2], "in": [2, 1], "größe": [1, 3], "": [5, 6]})

    assert chosen('"b.c" = 1', table) == [0]
    assert chosen('"say ""x""" = 2', table) == [1]
    assert chosen('"in" IN (1)', table) == [1]
    assert chosen("größe = 3", table) == [1]
    assert chosen('"" = 6', table) == [1]
    assert "b.c" in refusal("b.c = 1", table.schema)


@pytest.mark.parametrize(
    ("text", "character", "expected"),
    [
        ("", 1, "expected a column, found the end"),
        (" \n\t ", 5, "expected a column, found the end"),
        ("finish_reason", 1, "'finish_reason' of type string is no truth value"),
        ("finish_reason =", 16, 'expected a literal after "=", found the end'),
        ("finish_reason = AND", 17, 'expected a literal after "=", found AND'),
        ("finish_reason = length", 17, "text goes in single quotes"),
        ('finish_reason = "length"', 17, "text goes in single quotes"),
        ("finish_reason = NULL", 17, "write IS NULL or IS NOT NULL"),
        ("finish_reason = 'length", 17, "not closed"),
        ("finish_reason = 'it''s''", 17, "not closed"),
        ('"finish_reason = 1', 1, "not closed"),
        ("finish_reason = 'a' 'b'", 21, "expected AND, OR or the end, found 'b'"),
        ("(tiny = 1", 10, 'expected ")", AND or OR, found the end'),
        ("tiny = 1)", 9, 'expected AND, OR or the end, found ")"'),
        ("()", 2, 'expected a column, found ")"'),
        ("tiny = 1 AND", 13, "expected a column, found the end"),
        ("OR tiny = 1", 1, 'expected a column, found OR'),
        ("48 <= tiny", 1, "the column comes first"),
        ("TRUE", 1, "a column of that name goes in double quotes"),
        ("tiny IS 5", 9, "expected NULL or NOT NULL after IS, found 5"),
        ("tiny NOT 5", 10, "expected IN or LIKE after NOT, found 5"),
        ("tiny IN 5", 9, 'expected "(" after IN, found 5'),
        ("tiny IN ()", 10, 'expected a literal in the list, found ")"'),
        ("tiny IN (1, )", 13, 'expected a literal after ",", found ")"'),
        ("tiny IN (1, NULL)", 13, "write IS NULL or IS NOT NULL"),
        ("tiny BETWEEN 1 AND 2", 6, 'expected an operator (=, <>, <, <=, >, >=, IS, IN, LIKE)'),
        ("tiny = seed", 8, "columns are compared with literals only"),
        ("tiny < 1 < 2", 10, 'found "<"'),
        ("tiny = 1e5", 8, "1e5 is no number"),
        ("tiny = 1.2.3", 8, "1.2.3 is no number"),
        ("tiny = ٣", 8, "means nothing"),
        ("tiny = - 1", 8, '"-" means nothing in a filter'),
        ("tiny = 1" + "0" * 38, 8, "more than 38 digits"),
        ("tiny + 1 = 2", 6, '"+" means nothing in a filter'),
        ("row. = 1", 6, 'expected the name of a field after "."'),
        ("tinny = 1", 1, "did you mean 'tiny'? the columns are: finish_reason, completion,"),
        ("Finish_Reason = 'a'", 1, "did you mean 'finish_reason'?"),
        ("tiny = 1 AND Q = 1", 14, "there is no column 'Q'; the columns are: finish_reason,"),
        ("row.path = 'a'", 1, "'row' has no field 'path'; the fields are: file, row_group, index"),
        ("row.File = 'a'", 1, "did you mean 'file'?"),
        ("tiny.x = 'a'", 1, "column 'tiny' of type int8 has no field 'x'"),
        ("token_ids.x = 1", 1, "has no field 'x'"),
        ("finish_reason = 48", 17, "= 48 does not fit column 'finish_reason' of type string"),
        ("topic >= 48", 10, "dictionary<values=string, indices=int32, ordered=0>: write text"),
        ("finish_reason <> TRUE", 18, "write text, in single quotes"),
        ("row.file = 48", 12, "column 'row.file' of type string: write text"),
        ("tiny = '48'", 8, "= '48' does not fit column 'tiny' of type int8: write a number"),
        ("tiny NOT IN (1, 'x')", 17, "IN 'x' does not fit column 'tiny'"),
        ("score > FALSE", 9, "write a number"),
        ("price LIKE '1%'", 12, "LIKE is for text only"),
        ("score_contains = 1", 18, "write TRUE or FALSE"),
        ("score_contains > FALSE", 18, "> FALSE does not fit column 'score_contains' of type bool"),
        ("finish_reason LIKE 1", 20, "write text"),
        ("NOT tiny", 5, "column 'tiny' of type int8 is no truth value"),
        ("NOT row", 5, "is no truth value"),
        ("row = 'a'", 7, "only IS NULL and IS NOT NULL"),
        ("token_ids = 1", 13, "only IS NULL and IS NOT NULL"),
        ("day = '2024-02-30'", 7, "no such date"),
        ("day = '2024-02-28 10:00'", 7, "write a date, such as '2026-01-31'"),
        ("day = 20240228", 7, "write a date"),
        ("moment = 'yesterday'", 10, "such as '2026-01-31 08:30:00'"),
        ("moment < '2024-02-29T12:30.5'", 10, "write a date and time"),
        ("moment = '2024-02-28 25:00'", 10, "no such date"),
        ("moment = '2024-02-28 10:00Z'", 10, "without an offset"),
        ("zoned = '2024-02-28 10:00'", 9, "with an offset from UTC"),
        ("zoned = '2024-02-28'", 9, "with an offset from UTC"),
    ],
)  # fmt: skip
def test_a_fault_is_shown_where_it_is(text, character, expected):
    message = refusal(text)
    head, _, mark = message.splitlines()

    assert expected in head
    assert head.startswith(f"--where: character {character}: ")
    assert mark == "  " + " " * (mark.index("^") - 2) + "^"


def test_the_mark_stands_under_the_fault():
    _, shown, mark = refusal("tiny = 1 AND\tcolour = 'red'").splitlines()
    assert shown[mark.index("^") :].startswith("colour = ")

    _, shown, mark = refusal(f"tiny IN ({'1, ' * 5000} what {', 2' * 5000})").splitlines()
    assert shown[mark.index("^") :].startswith("what")
    assert len(shown) < 100


@pytest.mark.parametrize(
    "text",
    [
        "'; drop table rows; --",
        "tiny = 1; drop table rows",
        "finish_reason = 'a'; --",
        "finish_reason = 'a' -- the rest",
        "finish_reason = 'a' /* the rest */",
        "__import__('os').system('true')",
        "tiny = __import__('os')",
        "tiny.__class__ IS NULL",
        "__class__ IS NULL",
        "f(tiny)",
        "upper(finish_reason) = 'A'",
        "tiny = (SELECT 1)",
        "SELECT 1",
        "tiny IN (SELECT seed)",
        "1 = 1",
        "1 OR TRUE",
        "{tiny}",
        "{{ tiny }}",
        "tiny = $1",
        "tiny = ?",
        "tiny = :x",
        "tiny = 0x10",
        "finish_reason = E'\\n'",
        "finish_reason = 'a' || 'b'",
        "finish_reason = 'a' COLLATE nocase",
        "tiny::text = 'a'",
        "tiny = 1 \u200b",
        "finish_reason = \u2018length\u2019",
        "tiny \uff1d 1",
        "tiny = 1 \u0131n",
        "tiny \u0131s null",
        "tiny = 1\x00",
        "\x1b[2Jtiny = 1",
        "finish_reason = '\udcff'",
        "\udcff = 1",
        '"\udcff" = 1',
        "*",
        "lambda: 0",
    ],
)
def test_what_is_no_filter_is_refused_in_printable_words(text):
    message = refusal(text)

    assert message.startswith("--where: character ")
    assert all(line.isprintable() for line in message.splitlines())


@settings(max_examples=300, deadline=None)
@given(
    text=st.one_of(
        st.text(max_size=40),
        st.lists(
            st.sampled_from([
                "tiny", "row", ".", "file", "=", "<", "(", ")", "NOT", "AND", "OR", "IN", "IS",
                "NULL", "LIKE", "'a'", "1", ",", "TRUE", "score_contains", ";", "''", '"',
            ]),
            max_size=12,
        ).map(" ".join),
    )
)  # fmt: skip
def test_any_text_is_a_filter_or_a_config_error(text):
    try:
        found = RowFilter.parse(text, TABLE.schema)
    except ConfigError as error:
        assert str(error).startswith("--where: ")  # noqa: PT017  (either outcome is right)
    else:
        assert found.mask(TABLE).shape == (NUM_ROWS,)


def nested(depth):
    """A filter with as many kinds of nodes at every depth as there can be."""
    text = "tiny = 1"
    for _ in range(depth):
        text = f"score_contains OR score_contains AND NOT ({text})"
    return text


def test_nesting_is_bounded():
    assert chosen(nested(32)) == chosen(nested(2))
    assert "character 33: parentheses nest deeper than 32" in refusal(
        "(" * 10_000 + "tiny = 1" + ")" * 10_000
    )
    assert "parentheses nest deeper than 32" in refusal(nested(33))
    assert "parentheses nest deeper than 32" in refusal("(" * 20_000)
    # Side by side is not within.
    assert chosen(" OR ".join(["(tiny = 1)"] * 500)) == chosen("tiny = 1")


def test_long_filters_are_answered_up_to_a_bound():
    assert chosen("NOT " * 20_001 + "score_contains") == chosen("NOT score_contains")
    assert chosen(" AND ".join(["tiny >= 1"] * 1000)) == chosen("tiny >= 1")
    listed = ", ".join(f"'{number:064x}'" for number in range(1000))
    assert chosen(f"finish_reason IN ({listed}, 'length')") == chosen("finish_reason = 'length'")
    assert "has 100,001 characters; at most 100,000" in refusal("tiny = 1".ljust(100_001))
    assert "not closed" in refusal("tiny = '" + "''" * 40_000)


def test_patterns_are_bounded():
    assert chosen(f"finish_reason LIKE '{'%_' * 500}'") == chosen("finish_reason LIKE '%x' ")
    assert "a pattern has at most 1,000 characters" in refusal(f"topic LIKE '{'%a' * 501}'")


def test_a_missing_column_is_named_when_rows_are_asked():
    found = RowFilter.parse("tiny = 1", TABLE.schema)

    with pytest.raises(ConfigError, match="there is no column 'tiny'; the columns are: seed"):
        found.mask(TABLE.select(["seed"]))
