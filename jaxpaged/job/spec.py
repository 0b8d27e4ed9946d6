"""The job file as one frozen value: what a job is.

Knows nothing of the files the paths lead to.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated

import pydantic
from pydantic import Field

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError
from jaxpaged.job import spec_errors, spec_file
from jaxpaged.job.adapter_choice import AdapterChoice
from jaxpaged.job.sampling_section import SamplingSpec
from jaxpaged.job.section import NotEmpty, Section, empty_if_null
from jaxpaged.job.sections import EngineSpec, EvalSpec, InputSpec, OutputSpec
from jaxpaged.request import SamplingParams
from jaxpaged.storage import access
from jaxpaged.storage.options import StorageOptions, check_group

# For the schema; what is checked has messages of its own.
_Count = Annotated[int, Field(ge=0)]
_Percent = Annotated[str, Field(pattern=r"[0-9.]\s*%$")]


class JobSpec(Section):
    """A job: a model, rows, how to complete them, and where the result goes.

    Attributes:
        model: `pkg://distribution/path`, a folder in Hugging Face layout or that `jaxpaged convert`
            wrote, a `.gguf` file, or `hf://organisation/name@revision` (also with `/file.gguf`).
        input: The rows and their prompts.
        output: The result's place and form.
        adapters: Name to folder of LoRA adapters of the model, as PEFT saves them.
        adapter: The name of the adapter that completes all rows.
        adapter_column: The carried column that names each row's adapter; null or an empty text is
            the model as it is.
        sampling: How tokens are chosen.
        engine: Sizes and limits of the engine.
        storage: How the object stores of URLs in `input` and `output` are reached.
        eval: Scores, if the rows have reference answers.
        seed: Of every random choice; with a row's address it decides the row's random numbers.
        max_errors: Most rows that may end in an error, as a number or as a share such as "5%";
            one more fails the job, keeping the parts that are finished. None allows any number.
    """

    model: str = Field(min_length=1)
    input: InputSpec
    output: OutputSpec
    adapters: dict[NotEmpty, NotEmpty] | None = None
    adapter: str | None = None
    adapter_column: str | None = None
    sampling: SamplingSpec = SamplingSpec()
    engine: EngineSpec = EngineSpec()
    storage: StorageOptions = StorageOptions()
    eval: EvalSpec | None = None
    seed: int = Field(default=0, ge=0, lt=2**63)
    max_errors: int | str | None = None

    @pydantic.field_validator("sampling", "engine", mode="before")
    @classmethod
    def _empty_section(cls, value: object) -> object:
        return empty_if_null(value)

    @pydantic.field_validator("adapters")
    @classmethod
    def _check_adapters(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for name, path in (value or {}).items():
            # Groups of rows without one are counted under names like these.
            if name.startswith("(") or not name.isprintable():
                raise ValueError(
                    f"an adapter is called {name!r}; expected printable text that does not begin "
                    "with a parenthesis"
                )
            if "\0" in path:
                raise ValueError(f"expected a folder, found {path!r}")
        return value or None

    @pydantic.model_validator(mode="after")
    def _check_choice(self) -> "JobSpec":
        names = ", ".join(map(repr, self.adapters or {}))
        if self.adapter is not None and self.adapter_column is not None:
            raise ValueError("adapter and adapter_column exclude each other; leave one of them out")
        if self.adapter is not None and self.adapter not in (self.adapters or {}):
            raise ValueError(
                f"adapter: no adapter {self.adapter!r}; adapters has: {names or 'none'}"
            )
        if self.adapter_column is not None and not self.adapters:
            raise ValueError("adapter_column: adapters is missing, which has the folder of each")
        if self.adapters and self.adapter is None and self.adapter_column is None:
            raise ValueError(
                f"adapters: no row would use them; name one as adapter ({names}), or a column of "
                "names as adapter_column"
            )
        return self

    @pydantic.field_validator("storage", mode="before")
    @classmethod
    def _check_storage(cls, value: object) -> object:
        return check_group(value)

    @pydantic.field_validator(
        "max_errors",
        mode="before",
        json_schema_input_type=_Count | _Percent | None,
    )
    @classmethod
    def _check_max_errors(cls, value: object) -> object:
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if value is None or is_count or (isinstance(value, str) and _share(value) is not None):
            return value
        raise ValueError(f'expected a number of rows or a share such as "5%", found {value!r}')

    @classmethod
    def from_file(cls, path: str | pathlib.Path, overrides: Sequence[str] = ()) -> "JobSpec":
        """The job in a YAML file; its relative paths are relative to the file's folder.

        Args:
            path: The job file.
            overrides: `key.sub=value` strings that replace or add a key, the value read as YAML,
                as if it had been written in the file.

        Raises:
            ConfigError: The file or an override is wrong; the message lists every problem with
                file and line.
        """
        path = pathlib.Path(path)
        job = spec_file.read(path, overrides)
        return cls._build(job.value, str(path), path.parent, job.places)

    @classmethod
    def from_dict(cls, value: Mapping[str, object], base: pathlib.Path | None = None) -> "JobSpec":
        """The job in a dict shaped like a job file; relative paths are relative to `base`.

        Raises:
            ConfigError: A key is wrong; the message lists every problem.
        """
        return cls._build(dict(value), "job", base or pathlib.Path(), {})

    @classmethod
    def _build(
        cls,
        value: object,
        where: str,
        base: pathlib.Path,
        places: Mapping[tuple[str | int, ...], str],
    ) -> "JobSpec":
        try:
            spec = cls.model_validate(value)
        except pydantic.ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
            message = spec_errors.explain(problems, cls, where=where, places=places)
            raise ConfigError(message) from None
        return spec._with_base(base)

    def _with_base(self, base: pathlib.Path) -> "JobSpec":
        base = base.resolve()

        def absolute(path: str) -> str:
            if access.split(path) is not None:
                return path
            try:
                return os.path.normpath(base / pathlib.Path(path).expanduser())
            except RuntimeError:
                raise ConfigError(f"{path}: no such user's folder; write the whole path") from None

        path = self.input.chat_template_path
        return self.model_copy(
            update={
                "model": absolute(self.model),
                "adapters": self.adapters
                and {name: absolute(path) for name, path in self.adapters.items()},
                "input": self.input.model_copy(
                    update={
                        "path": tuple(absolute(path) for path in self.input.path),
                        "chat_template": self.input.chat_template
                        if path is None
                        else absolute(path),
                    }
                ),
                "output": self.output.model_copy(
                    update={"path": _resolved(absolute(self.output.path))}
                ),
            }
        )

    def sampling_params(self) -> SamplingParams:
        """The parameters of a row that sets none of its own."""
        names = [field.name for field in dataclasses.fields(SamplingParams)]
        return SamplingParams(**{name: getattr(self.sampling, name) for name in names})

    def adapter_choice(self) -> AdapterChoice | None:
        """How rows choose an adapter; None for a job without any."""
        if self.adapters is None:
            return None
        return AdapterChoice(
            names=tuple(self.adapters), fixed=self.adapter, column=self.adapter_column
        )

    def engine_config(self) -> EngineConfig:
        """The engine's settings, the job's seed among them."""
        values = {name: getattr(self.engine, name) for name in type(self.engine).model_fields}
        rope = self.engine.rope.parameters() if self.engine.rope else None
        return EngineConfig(**(values | {"rope": rope, "seed": self.seed}))

    def error_limit(self, num_rows: int) -> int | None:
        """Most row errors allowed for a job of `num_rows` rows; None allows any number."""
        if not isinstance(self.max_errors, str):
            return self.max_errors
        share = _share(self.max_errors)
        # 29% of 100 rows is 28.999999999999996 in floating point.
        return None if share is None else int(share * num_rows + 1e-9)


def parse_storage(settings: Sequence[str]) -> StorageOptions:
    """The section `storage` from `s3.key=value` strings, as a command line has them.

    Raises:
        ConfigError: A key or value is wrong.
    """
    section: dict[str, object] = {}
    for text in settings:
        key, value = spec_file.parse_override(text, option="--storage")
        spec_file.put(section, key, value, option="--storage")
    try:
        return StorageOptions.model_validate(section)
    except pydantic.ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        message = spec_errors.explain(problems, StorageOptions, where="--storage", places={})
        raise ConfigError(message) from None


def _resolved(path: str) -> str:
    if access.split(path) is not None:
        return path
    try:
        return str(pathlib.Path(path).resolve())
    except (OSError, RuntimeError):
        raise ConfigError(f"output.path: {path} is a link that leads back to itself") from None


def _share(text: str) -> float | None:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        return None
    return percent / 100 if text.endswith("%") and 0 <= percent <= 100 else None
