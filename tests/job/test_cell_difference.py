import datetime
import decimal
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.job.look import cell_difference

NAN = float("nan")
OTHER_NAN = np.frombuffer(np.uint64(0x7FF8000000000001).tobytes(), np.float64)[0]


def differ(a: list, b: list, kind: pa.DataType, other: pa.DataType | None = None) -> list[bool]:
    return cell_difference.differ(pa.array(a, kind), pa.array(b, other or kind)).tolist()


def test_text_differs_by_value_and_null_is_like_null_alone():
    a, b = ["x", None, None, "", "é"], ["x", None, "", None, "é"]
    assert differ(a, b, pa.string()) == [False, False, True, True, False]


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32()])
def test_floats_differ_bit_for_bit_but_nan_is_nan(kind):
    a = [1.0, 0.0, NAN, NAN, math.inf, None, 1.0]
    b = [1.0, -0.0, -NAN, 1.0, math.inf, NAN, math.nextafter(1.0, 2) if kind == "double" else 2.0]
    assert differ(a, b, kind) == [False, True, False, True, False, True, True]


def test_any_payload_of_nan_is_nan():
    assert differ([NAN], [OTHER_NAN], pa.float64()) == [False]
    assert differ([[1.0, NAN]], [[1.0, OTHER_NAN]], pa.list_(pa.float64())) == [False]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float64()),
        pa.large_list(pa.float64()),
        pa.list_(pa.dictionary(pa.int8(), pa.float64())),
    ],
)
def test_lists_differ_item_by_item(kind):
    a = [[], None, [1.0], [0.0], [1.0, 2.0], [None], [1.0, NAN], [], [3.0]]
    b = [[], [], [1.0], [-0.0], [1.0], [1.0], [1.0, NAN], None, [3.0]]
    assert differ(a, b, kind) == [False, True, False, True, True, True, False, True, False]


def test_lists_of_a_fixed_size():
    kind = pa.list_(pa.int32(), 2)
    assert differ([[1, 2], None, [1, 2], [1, 2]], [[1, 2], None, [1, 3], None], kind) == [
        False,
        False,
        True,
        True,
    ]


def test_structs_and_maps_differ_in_depth():
    kind = pa.struct([("role", pa.string()), ("ids", pa.list_(pa.int64()))])
    one = {"role": "user", "ids": [1, 2]}
    found = differ(
        [one, one, None, one, {"role": None, "ids": None}],
        [one, {**one, "ids": [1, 3]}, None, None, {"role": None, "ids": []}],
        kind,
    )
    assert found == [False, True, False, True, True]
    pairs = pa.map_(pa.string(), pa.float64())
    assert differ(
        [[("a", 0.0)], [("a", NAN)], [("a", 0.0)], None],
        [[("a", -0.0)], [("a", NAN)], [("b", 0.0)], None],
        pairs,
    ) == [True, False, True, False]
    assert differ([{}], [{}], pa.struct([])) == [False]


def test_slices_are_compared_where_they_begin():
    lists = pa.array([[9], [1, 2], None, [3]], pa.list_(pa.int64()))
    maps = pa.array([[("z", 9)], [("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64()))
    assert cell_difference.differ(lists[1:], lists[1:]).tolist() == [False] * 3
    assert cell_difference.differ(lists[1:3], lists[2:4]).tolist() == [True, True]
    assert cell_difference.differ(maps[1:], maps[1:]).tolist() == [False] * 2
    assert cell_difference.differ(maps[:2], maps[1:]).tolist() == [True, True]


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        ([1, 2], [1, 3], pa.decimal128(5, 2)),
        ([datetime.date(2020, 1, 1)] * 2, [datetime.date(2020, 1, i) for i in (1, 2)], pa.date32()),
        ([0, 1], [0, 2], pa.timestamp("ns", "UTC")),
        ([b"a", b"\xff"], [b"a", b"\xfe"], pa.binary()),
        ([b"a", b"\xff"], [b"a", b"\xfe"], pa.binary(1)),
        ([True, True], [True, False], pa.bool_()),
        ([np.float16(1), np.float16(0.0)], [np.float16(1), np.float16(-0.0)], pa.float16()),
    ],
)
def test_other_types_differ_by_value(a, b, kind):
    if kind == pa.decimal128(5, 2):
        a, b = ([decimal.Decimal(i) for i in side] for side in (a, b))
    assert differ(a, b, kind) == [False, True]


def test_cells_of_a_null_type_are_all_the_same():
    assert differ([None], [None], pa.null()) == [False]
    assert differ([None, None], ["a", None], pa.null(), pa.string()) == [True, False]


def test_types_that_differ_are_compared_in_one_that_takes_both():
    assert differ(["a", "b"], ["a", "c"], pa.string(), pa.large_string()) == [False, True]
    assert differ([1, 2], [1, 3], pa.int32(), pa.int64()) == [False, True]
    assert differ([0.1, 0.5], [0.1, 0.5], pa.float32(), pa.float64()) == [True, False]
    assert differ([b"\xff", b"a"], ["b", "a"], pa.binary(), pa.string()) == [True, False]
    assert differ([[1]], [[1]], pa.list_(pa.int32()), pa.large_list(pa.int64())) == [False]


def test_a_cell_that_does_not_fit_the_common_type_differs():
    # No double is this number, and rounded both would be the same.
    odd = [2**53 + 1, 1, 2**53 + 1]
    assert differ(odd, [2.0**53, 1.0, None], pa.int64(), pa.float64()) == [True, False, True]
    assert differ([2.0**53, 1.0, None], odd, pa.float64(), pa.int64()) == [True, False, True]


def test_types_without_a_common_one_differ_everywhere():
    assert cell_difference.common_type(pa.string(), pa.int64()) is None
    assert differ(["1", None], [1, None], pa.string(), pa.int64()) == [True, True]
    assert cell_difference.common_type(pa.binary(), pa.int64()) is None


_VALUES = st.lists(
    st.none()
    | st.lists(
        st.none()
        | st.fixed_dictionaries(
            {"x": st.none() | st.sampled_from([0.0, -0.0, 1.0, NAN]), "y": st.sampled_from("ab")}
        ),
        max_size=2,
    ),
    min_size=6,
    max_size=6,
)


@settings(deadline=None)
@given(a=_VALUES, b=_VALUES)
def test_nested_cells_differ_just_where_their_texts_do(a, b):
    kind = pa.list_(pa.struct([("x", pa.float64()), ("y", pa.string())]))
    texts = [[repr(cell) for cell in pa.array(side, kind).to_pylist()] for side in (a, b)]

    # repr tells 0.0 from -0.0, and not NaN from NaN.
    assert differ(a, b, kind) == [x != y for x, y in zip(*texts, strict=True)]
