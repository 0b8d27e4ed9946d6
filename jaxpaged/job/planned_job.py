"""A job with its input and model looked at: all that is known before weights are loaded."""

import dataclasses
import pathlib

from jaxpaged.config import DEFAULT_MAX_MODEL_LEN
from jaxpaged.errors import ConfigError
from jaxpaged.job import columns, identity, input_files, input_plan
from jaxpaged.job.columns import ColumnPlan
from jaxpaged.job.input_plan import InputPlan
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.units import Units
from jaxpaged.model.checkpoint import Checkpoint, open_checkpoint
from jaxpaged.model.checkpoint.tensors import check_tensors
from jaxpaged.model.source import locate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job and what its input and model turned out to be.

    Attributes:
        spec: The job.
        output: The output folder.
        inputs: The input's files.
        checkpoint: The model's files.
        columns: What is read and written.
        units: How the rows are cut into parts.
        record: What the output folder remembers of the job.
    """

    spec: JobSpec
    output: pathlib.Path
    inputs: InputPlan
    checkpoint: Checkpoint
    columns: ColumnPlan
    units: Units
    record: dict[str, object]

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion together."""
        limit = self.checkpoint.config.max_position_embeddings
        return self.spec.engine.max_model_len or min(limit, DEFAULT_MAX_MODEL_LEN)

    def check_model(self) -> None:
        """Finds what the engine would refuse, without reading weights.

        Raises:
            ConfigError: `engine.max_model_len` is above the model's limit.
            CheckpointError: The weights are missing, or not those of the configuration.
        """
        config, path = self.checkpoint.config, self.checkpoint.path
        if self.max_model_len > config.max_position_embeddings:
            raise ConfigError(
                f"engine.max_model_len is {self.max_model_len}, the model was made for at most "
                f"{config.max_position_embeddings} tokens; use a smaller value"
            )
        check_tensors(config, self.checkpoint.shapes(), str(path))


def plan(spec: JobSpec) -> PlannedJob:
    """The planned job; reads the input's footers and the headers of the model's files.

    Raises:
        ConfigError: Input and output overlap, a template is malformed, or there is no model.
        CheckpointError: The model's files are missing, damaged or of another architecture.
        InputSchemaError: The input is missing, broken, or not what the job needs.
    """
    output = pathlib.Path(spec.output.path)
    inputs = input_plan.plan(spec.input.path)
    input_files.check_output_apart(spec.input.path, output)
    columns_plan = columns.plan(spec, inputs)
    checkpoint = open_checkpoint(locate(spec.model))
    return PlannedJob(
        spec=spec,
        output=output,
        inputs=inputs,
        checkpoint=checkpoint,
        columns=columns_plan,
        units=Units(num_rows=inputs.num_rows, rows_per_part=spec.output.rows_per_part),
        record=identity.record(spec, inputs, checkpoint.fingerprint()),
    )
