import decimal

import pytest

from jaxpaged.job import scores


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        ("Paris.", "paris", True),
        (' "Paris". ', "Paris", True),
        ("New  York\ncity", "new york city", True),
        ("Parisian", "Paris", False),
        ("It is Paris", "Paris", False),
        ("U.S.A.", "u.s.a", True),
        ("Straße", "STRASSE", True),
        ("5", 5, True),
        ("5", 5.0, True),
        ("5", decimal.Decimal("5.00"), True),
        ("100", decimal.Decimal("1E+2"), True),
        ("1.5", decimal.Decimal("1.50"), True),
        ("true", True, True),
        ("a", None, None),
        ("", "...", None),
        ("", "a", False),
    ],
)
def test_exact_match(completion, reference, value):
    assert scores.score("exact_match", completion, reference) is value


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        ("the answer is 12.", "12", True),
        ("112", "12", False),
        ("12.5", "12", False),
        ("3.12", "12", False),
        ("1,200", "1", False),
        ("12, 13 or 14", "13", True),
        ("12th", "12", False),
        ("category", "cat", False),
        ("a cat!", "CAT", True),
        ("concatenate a cat", "cat", True),
        ("東京です", "東京", True),
        ("C++ rocks", "C++", True),
        ("it is 5%", "5", True),
        ("new\n york", "New York", True),
        ("anything", "", None),
        ("anything", None, None),
    ],
)
def test_contains(completion, reference, value):
    assert scores.score("contains", completion, reference) is value


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        ("3 + 4 = 7", "7", True),
        ("7 is 3 + 4", "7", False),
        ("it costs $1,234.50.", 1234.5, True),
        ("72 clips", "#### 72", True),
        ("-4", -4, True),
        ("\u22124", -4, True),
        ("10-3", 3, True),
        ("1e3", 1000, True),
        (".5", 0.5, True),
        ("0.33333333", 1 / 3, True),
        ("0.333", 1 / 3, False),
        ("none", 3, False),
        ("3", "no number", None),
        ("3", None, None),
    ],
)
def test_numeric_match(completion, reference, value):
    assert scores.score("numeric_match", completion, reference) is value


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        ("yes, it is", "^yes", True),
        ("Yes", "^yes", False),
        ("Yes", "(?i)^yes$", True),
        ("é", "^.$", True),
        ("a", "(", None),
        ("a", "(?=a)", None),
        ("a", "((a{1000}){1000})", None),
        ("a", "a" * 1001, None),
        ("a", "", None),
        ("a", None, None),
    ],
)
def test_regex_match(completion, reference, value):
    assert scores.score("regex_match", completion, reference) is value


def test_a_pattern_in_the_data_cannot_stall_the_job():
    assert scores.score("regex_match", "a" * 50_000 + "b", "^(a+)+$") is False
