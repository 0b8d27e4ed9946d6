"""How object stores are reached: the job file's section `storage`.

Secrets are never part of it: they are named as `${ENV:NAME}` and looked up when a connection is
made. Knows nothing of the libraries that connect.
"""

import os
import re
from typing import Annotated
from urllib.parse import urlsplit

import pydantic
from pydantic import BeforeValidator, Field

from jaxpaged.errors import ConfigError

_REFERENCE = re.compile(r"\$\{ENV:([A-Za-z_][A-Za-z0-9_]*)\}")


def _check_reference(value: object) -> object:
    # Never repeats the value: it may be the secret itself.
    if value is not None and not (isinstance(value, str) and _REFERENCE.fullmatch(value)):
        raise ValueError(
            "expected the name of an environment variable as ${ENV:NAME}; secrets are not written "
            "into job files"
        )
    return value


def _check_endpoint(value: str | None) -> str | None:
    if value is None:
        return None
    try:
        parts = urlsplit(value)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        is_whole = has_port = False
    if "@" in value:
        raise ValueError("expected a URL without user and password; name them as ${ENV:NAME}")
    if not is_whole or not has_port or "?" in value or "#" in value:
        raise ValueError("expected a URL such as https://storage.example.com:9000")
    return value


def check_group(value: object) -> object:
    """The value of a section of options, an empty one for None.

    Raises:
        ValueError: It is no group of keys; the message does not repeat it.
    """
    if value is None:
        return {}
    if not isinstance(value, dict | pydantic.BaseModel):
        # Whatever stands here could be a secret in the wrong place.
        raise ValueError("expected a group of keys")
    return value


_ReferenceText = Annotated[str, Field(pattern=f"^{_REFERENCE.pattern}$")]

Secret = Annotated[
    str | None,
    BeforeValidator(_check_reference, json_schema_input_type=_ReferenceText | None),
]
"""The name of an environment variable, as `${ENV:NAME}`."""

_Endpoint = Annotated[str | None, pydantic.AfterValidator(_check_endpoint)]
_Name = Annotated[str | None, Field(min_length=1)]


class _Options(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        strict=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )


class S3Options(_Options):
    """How s3:// is reached; what is left out comes from the AWS_* variables and config files.

    Attributes:
        endpoint_url: Of a store other than Amazon's.
        region: As in us-east-1.
        profile: The section of the AWS config files.
        anonymous: Requests are not signed.
        key: The access key, as ${ENV:NAME}.
        secret: The secret access key, as ${ENV:NAME}.
        token: The session token of temporary keys, as ${ENV:NAME}.
    """

    endpoint_url: _Endpoint = None
    region: _Name = None
    profile: _Name = None
    anonymous: bool = False
    key: Secret = None
    secret: Secret = None
    token: Secret = None

    @pydantic.model_validator(mode="after")
    def _check_keys(self) -> "S3Options":
        if (self.key is None) != (self.secret is None):
            raise ValueError("key and secret go together; give both or neither")
        if self.token is not None and self.key is None:
            raise ValueError("token goes with key and secret; give all three")
        if self.anonymous and (self.key is not None or self.profile is not None):
            raise ValueError("anonymous goes without key, secret, token and profile")
        return self


class GSOptions(_Options):
    """How gs:// is reached; what is left out comes from Google's default credentials.

    Attributes:
        project: The project that is billed.
        endpoint_url: Of a store other than Google's.
        anonymous: Requests are not signed.
        token: An access token, or the path of a file with credentials, as ${ENV:NAME}.
    """

    project: _Name = None
    endpoint_url: _Endpoint = None
    anonymous: bool = False
    token: Secret = None

    @pydantic.model_validator(mode="after")
    def _check_token(self) -> "GSOptions":
        if self.anonymous and self.token is not None:
            raise ValueError("anonymous goes without token")
        return self


class StorageOptions(_Options):
    """How the object stores of a job are reached.

    Attributes:
        s3: For s3:// URLs.
        gs: For gs:// URLs.
    """

    s3: Annotated[S3Options, BeforeValidator(check_group)] = S3Options()
    gs: Annotated[GSOptions, BeforeValidator(check_group)] = GSOptions()


def look_up(reference: str | None, key: str) -> str | None:
    """The secret that `${ENV:NAME}` stands for; None for None.

    Args:
        reference: What the job file has.
        key: Its dotted name there.

    Raises:
        ConfigError: The variable is not set, or empty; the message names it.
    """
    if reference is None:
        return None
    match = _REFERENCE.fullmatch(reference)
    assert match is not None, "checked when the options were made"
    # The job file names the variable; nothing else is read from the environment.
    value = os.environ.get(match[1], "")  # noqa: TID251
    if not value:
        raise ConfigError(
            f"{key}: the environment variable {match[1]} is not set; set it, or remove the key"
        )
    return value
