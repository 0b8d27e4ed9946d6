"""A job with its input looked at: everything that is known before a model is loaded."""

import dataclasses
import pathlib

from jaxpaged.job import columns, identity, input_files, input_plan
from jaxpaged.job.columns import ColumnPlan
from jaxpaged.job.input_plan import InputPlan
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.units import Units


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job and what its input turned out to be.

    Attributes:
        spec: The job.
        output: The output folder.
        inputs: The input's files.
        columns: What is read and written.
        units: How the rows are cut into parts.
        record: What the output folder remembers of the job.
    """

    spec: JobSpec
    output: pathlib.Path
    inputs: InputPlan
    columns: ColumnPlan
    units: Units
    record: dict[str, object]


def plan(spec: JobSpec) -> PlannedJob:
    """The planned job; reads the input's footers.

    Raises:
        ConfigError: Input and output overlap, or a template is malformed.
        InputSchemaError: The input is missing, broken, or not what the job needs.
    """
    output = pathlib.Path(spec.output.path)
    inputs = input_plan.plan(spec.input.path)
    input_files.check_output_apart(spec.input.path, output)
    return PlannedJob(
        spec=spec,
        output=output,
        inputs=inputs,
        columns=columns.plan(spec, inputs),
        units=Units(num_rows=inputs.num_rows, rows_per_part=spec.output.rows_per_part),
        record=identity.record(spec, inputs),
    )
