import numpy as np
import pyarrow as pa
import pytest

from jaxpaged.job.input.row_batch import RowBatch
from jaxpaged.job.units import Unit


def values(array: pa.Array) -> list:
    batch = RowBatch(
        unit=Unit(index=0, start=0, stop=len(array)),
        start=0,
        file="a.parquet",
        row_group=0,
        first_index=0,
        cells=pa.record_batch({"x": array}),
        invalid={},
    )
    return batch.values("x")


@pytest.mark.parametrize(
    ("kind", "cells"),
    [
        (pa.float32(), [0.1, None, 1e30, float("inf")]),
        (pa.list_(pa.float32()), [[0.1, None], None]),
        (pa.struct([("a", pa.float32()), ("b", pa.string())]), [{"a": 0.1, "b": "x"}, None]),
        (pa.float64(), [0.1, 0.10000000149011612]),
    ],
)
def test_floats_are_the_shortest_decimals_that_they_are(kind, cells):
    assert values(pa.array(cells, kind)) == cells


def test_half_floats_too():
    assert values(pa.array(np.array([0.1], np.float16))) == [0.1]
