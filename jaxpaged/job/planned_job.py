"""A job with its input, model and output looked at: all that is known before weights are loaded."""

import dataclasses
import datetime
import hashlib
from collections.abc import Callable

from jaxpaged.config import DEFAULT_MAX_MODEL_LEN
from jaxpaged.errors import ConfigError, IdentityError, JobError
from jaxpaged.job import columns
from jaxpaged.job.columns import ColumnPlan
from jaxpaged.job.input import input_files, input_plan
from jaxpaged.job.input.input_plan import InputPlan
from jaxpaged.job.output import history, identity, output_view, part_file
from jaxpaged.job.output.history import History, JobRecord
from jaxpaged.job.prompt import chosen_template
from jaxpaged.job.prompt.prompt_tokenizer import PromptTokenizer
from jaxpaged.job.prompt.prompts import PromptBuilder
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.units import Units
from jaxpaged.model import config_stretch
from jaxpaged.model.checkpoint import Checkpoint, open_checkpoint
from jaxpaged.model.checkpoint.adapter import Adapter, open_adapters
from jaxpaged.model.checkpoint.tensors import check_tensors
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.source import Source, resolve
from jaxpaged.storage import access
from jaxpaged.storage.disk import Disk
from jaxpaged.storage.files import SourceFiles
from jaxpaged.storage.store import Store

_ALL_WEIGHTS = "weights, every byte"
_CHUNK_BYTES = 4 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job and what its input, model and output turned out to be.

    Attributes:
        spec: The job.
        store: Where the output lies.
        inputs: The input's files.
        checkpoint: The model's files.
        adapters: Its adapters, by name.
        columns: What is read and written.
        units: How the rows are cut into parts.
        seen: What the output folder remembers; None if no job began there, or none that
            completed anything.
        history: What it remembers once this job runs.
        refusal: Why the output folder cannot be this job's, where that is no error yet.
    """

    spec: JobSpec
    store: Store
    inputs: InputPlan
    checkpoint: Checkpoint
    adapters: dict[str, Adapter]
    columns: ColumnPlan
    units: Units
    seen: History | None
    history: History
    refusal: JobError | None = None

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion together."""
        limit = self.checkpoint.config.max_position_embeddings
        return self.spec.engine.max_model_len or min(limit, DEFAULT_MAX_MODEL_LEN)

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration, with the rotation that the job asks for.

        Raises:
            ConfigError: There is no such rotation.
        """
        return config_stretch.stretched(self.checkpoint.config, self.spec.engine_config().rope)

    @property
    def is_finished(self) -> bool:
        """Whether the output folder holds all parts of this very job."""
        return output_view.is_finished(self.store, self.history, self.units)

    def prompt_builder(self, tokenizer: PromptTokenizer) -> PromptBuilder:
        """What makes the job's prompts; the date in them is that of the job's beginning.

        Raises:
            ConfigError: A prompt does not suit the model.
        """
        began = datetime.datetime.fromisoformat(self.history.job.created).replace(tzinfo=None)
        return PromptBuilder(
            self.spec,
            tokenizer,
            self.inputs.schema.names,
            moment=began,
            max_model_len=self.max_model_len,
        )

    def check_model(self) -> None:
        """Finds what the engine would refuse, without reading weights.

        Raises:
            ConfigError: `engine.max_model_len` is above the model's limit, `engine.rope` is not
                right, or `sampling` names a token that the model does not have.
            CheckpointError: The weights are missing, or not those of the configuration.
        """
        config, path = self.model_config, self.checkpoint.path
        config_stretch.check_length(self.max_model_len, config)
        sampling = self.spec.sampling
        biased = tuple(token_id for token_id, _ in sampling.logit_bias)
        for key, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", biased)):
            unknown = [token_id for token_id in ids if token_id >= config.vocab_size]
            if unknown:
                raise ConfigError(
                    f"sampling.{key}: token id {unknown[0]} is not in the model's vocabulary of "
                    f"{config.vocab_size:,}"
                )
        check_tensors(config, self.checkpoint.shapes(), str(path))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run is told beside the job.

    Attributes:
        extends: New input files are taken into the job that the output folder holds.
        repairs: Units whose parts do not verify are completed again.
        verifies_weights: Every byte of the weights counts, not only their headers and sizes.
        looks_only: Nothing will be run: what would be refused is kept in `refusal` instead.
        disk: How local output is written; None for the real disk.
    """

    extends: bool = False
    repairs: bool = False
    verifies_weights: bool = False
    looks_only: bool = False
    disk: Disk | None = None


def plan(
    spec: JobSpec,
    options: RunOptions | None = None,
    *,
    note: Callable[[str], None] | None = None,
) -> PlannedJob:
    """The planned job; reads footers and bytes of the input and the headers of the model's files.

    Args:
        spec: The job.
        options: What a run is told beside the job.
        note: Is told how far the download of a model is.

    Raises:
        ConfigError: Input and output overlap, a template is malformed, or there is no model.
        CheckpointError: The files of the model or of an adapter are missing, damaged or of another
            architecture.
        InputSchemaError: The input is missing, broken, or not what the job needs.
        OutputConflictError: The output folder is not ours.
        IdentityError: The output folder holds results of a job that differs.
    """
    options = options or RunOptions()
    files = SourceFiles(spec.storage)
    input_files.check_output_apart(spec.input.path, spec.output.path, files=files)
    store = open_output(spec, options.disk)
    seen, refusal = _seen(store, options)
    inputs = input_plan.plan(spec.input.path, files=files, known=seen.files if seen else ())
    columns_plan = columns.plan(spec, inputs)
    source = resolve(spec.model, note=note)
    checkpoint = open_checkpoint(source.path)
    adapters = open_adapters(spec.adapters or {}, checkpoint.config)
    model = _model(spec, checkpoint, seen, options)
    model |= {f"adapter {name}": adapter.digest for name, adapter in adapters.items()}
    record = _record(spec, inputs, columns_plan, source=source, model=model)
    try:
        known = _history(seen, record, store=store, extends=options.extends)
    except IdentityError as error:
        if not options.looks_only:
            raise
        known, refusal = History(job=record), error
    return PlannedJob(
        spec=spec,
        store=store,
        inputs=inputs,
        checkpoint=checkpoint,
        adapters=adapters,
        columns=columns_plan,
        units=Units(
            segments=known.segments,
            rows_per_part=spec.output.rows_per_part,
            rows_each=columns_plan.rows_each,
        ),
        seen=seen,
        history=known,
        refusal=refusal,
    )


def open_output(spec: JobSpec, disk: Disk | None = None) -> Store:
    """Where a job's output lies; nothing is made yet."""
    return access.open_store(
        spec.output.path,
        spec.storage,
        private=output_view.PRIVATE,
        durability=spec.output.durability,
        disk=disk,
    )


def _seen(store: Store, options: RunOptions) -> tuple[History | None, JobError | None]:
    """What the folder remembers, if it holds results; what is wrong with it, where one only
    looks."""
    try:
        output_view.check_ours(store)
        return (history.read(store) if output_view.has_results(store) else None), None
    except JobError as error:
        if not options.looks_only:
            raise
        return None, error


def _record(
    spec: JobSpec,
    inputs: InputPlan,
    columns_plan: ColumnPlan,
    *,
    source: Source,
    model: dict[str, str],
) -> JobRecord:
    return history.job_record(
        # Of a model that can move, the name holds where it is: a job that begins with a branch is
        # the same as one that names its commit, and another one once the branch has moved.
        result_keys={**identity.result_keys(spec), "model": source.name},
        run_keys=identity.run_keys(spec),
        model=model,
        files=inputs.records,
        schema=part_file.columns(columns_plan.output),
    )


def _history(seen: History | None, record: JobRecord, *, store: Store, extends: bool) -> History:
    """The seen history, extended if need be; that of a new job if there is none."""
    if seen is None:
        return History(job=record)
    try:
        identity.check_same(seen, record, place=store.url, extends=extends)
    except IdentityError:
        last = seen.revisions[-1] if seen.revisions else None
        if last is None or last.kind != "extend" or output_view.is_settled(store, last):
            raise
        # Nothing of it is committed: without it, this may be the job that there was before.
        seen = seen.without_last()
        identity.check_same(seen, record, place=store.url, extends=extends)
    added = identity.new_files(seen, record)
    return seen.followed_by(seen.extension(added)) if added else seen


def _model(
    spec: JobSpec, checkpoint: Checkpoint, seen: History | None, options: RunOptions
) -> dict[str, str]:
    """The model's fingerprint; of all bytes if that is wanted now or was when the job began."""
    model = dict(checkpoint.fingerprint())
    if spec.input.chat_template is not None:
        # What is chosen counts, whatever else the model has.
        model["chat_template"] = chosen_template.digest(spec.input, checkpoint.chat_templates())
    was_verified = seen is not None and _ALL_WEIGHTS in seen.job.model
    if options.verifies_weights and seen is not None and not was_verified:
        raise IdentityError(
            "--verify-weights: this job began without it, so that nothing is known of the weights "
            "it began with; leave it out, or choose another output.path"
        )
    if options.verifies_weights or was_verified:
        digest = hashlib.sha256()
        for path in checkpoint.weight_files():
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        model[_ALL_WEIGHTS] = digest.hexdigest()
    return model
