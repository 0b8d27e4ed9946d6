from jaxpaged.job import attribute_docs


class Described:
    """Says what it is,
    on two lines.

    More of it.

    Attributes:
        first: One line: with a colon.
        second: Two lines,
            of which this is one.

    Raises:
        third: Is none.
    """


class Silent:
    pass


def test_entries_are_read_whole_and_nothing_else_is():
    assert attribute_docs.attributes(Described) == {
        "first": "One line: with a colon.",
        "second": "Two lines, of which this is one.",
    }
    assert attribute_docs.summary(Described) == "Says what it is, on two lines."


def test_a_class_that_says_nothing_describes_nothing():
    assert attribute_docs.attributes(Silent) == {}
    assert attribute_docs.summary(Silent) == ""
