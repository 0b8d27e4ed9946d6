"""The JSON Schema of the job file, for editors: made from `JobSpec` and what belongs to it.

Keys, types and defaults are those of the sections, descriptions those of their docstrings, ranges
those of the dataclasses that own them. What a section takes beside the type of its field (a text
for a list of one, a null for an empty group) stands in the section, next to what takes it.

The schema refuses nothing that a job file may hold. It knows less than `JobSpec`: nothing of files,
columns and URLs, and little of keys that go together.
"""

import re
from typing import Any

import pydantic
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from jaxpaged.config import EngineConfig
from jaxpaged.job import attribute_docs
from jaxpaged.job.sampling_section import SamplingSpec
from jaxpaged.job.sections import EngineSpec
from jaxpaged.job.spec import JobSpec
from jaxpaged.request import SamplingParams

TITLE = "Job file of jaxpaged"

# Whose fields a section's keys are.
_OWNERS: dict[type, type[EngineConfig | SamplingParams]] = {
    EngineSpec: EngineConfig,
    SamplingSpec: SamplingParams,
}

_YAML_WORDS = {"None": "null", "True": "true", "False": "false"}


def job_schema() -> dict[str, Any]:
    """The schema, in JSON's types."""
    body = JobSpec.model_json_schema(schema_generator=_Generator)
    return {
        "$schema": _Generator.schema_dialect,
        "title": TITLE,
        "description": _in_yaml(attribute_docs.summary(JobSpec)),
        **body,
    }


class _Generator(GenerateJsonSchema):
    """Describes every key, and leaves out what would tell an editor nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ANN401  (pydantic's unions)
        """Never: such a title would be the key again."""
        return False

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """A section: its keys with their descriptions and ranges."""
        section = schema["cls"]
        found = super().model_schema(schema)
        for name in ("title", "description"):
            found.pop(name, None)
        docs = _descriptions(section)
        ranges = _OWNERS[section].RANGES if section in _OWNERS else {}
        for name, key in found["properties"].items():
            # What a group of keys is by default its own keys say; lists are empty.
            if isinstance(default := key.get("default"), dict | list):
                del key["default"]
            if isinstance(default, dict):
                key["anyOf"] = [{"$ref": key.pop("$ref")}, {"type": "null"}]
            if name in docs:
                key["description"] = docs[name]
            if name in ranges:
                key.update(ranges[name].json_schema())
        return found

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """The same, as a list of types where that is enough: editors show it better."""
        found = super().nullable_schema(schema)
        inner, *others = found.get("anyOf", [{}])
        if others != [{"type": "null"}] or not isinstance(inner.get("type"), str):
            return found
        choices = {"enum": [*inner["enum"], None]} if "enum" in inner else {}
        return {**inner, **choices, "type": [inner["type"], "null"]}


def _descriptions(section: type[pydantic.BaseModel]) -> dict[str, str]:
    """Of each key; what a section says of a key itself goes before what its owner says."""
    docs = attribute_docs.attributes(section)
    if section in _OWNERS:
        docs = attribute_docs.attributes(_OWNERS[section]) | docs
    return {name: _in_yaml(text) for name, text in docs.items()}


def _in_yaml(text: str) -> str:
    """A docstring's text with values as a job file writes them."""
    return re.sub(r"\b(None|True|False)\b", lambda word: _YAML_WORDS[word[1]], text)
