"""What an error of a remote file system means, and how it is told to a user.

Knows the errors of s3fs, gcsfs and what they are built on by name and status code, so that none of
them is imported here. No text of theirs is passed on before credentials are taken out of it.
"""

import errno
import re
from typing import Literal

Meaning = Literal["missing", "exists", "no bucket", "denied", "unsupported", "wrong", "passing"]
"""What to make of an error.

    missing      there is nothing under this name
    exists       a conditional write found something under this name
    no bucket    the bucket itself does not exist
    denied       the credentials are missing, wrong, or lack a right
    unsupported  the store does not know this kind of request
    wrong        the same request will always fail
    passing      the next try may succeed, or the last one did and only its answer was lost
"""

_LIBRARIES = ("aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "google", "http", "requests")
_NO_CREDENTIALS = frozenset(
    {
        "DefaultCredentialsError",
        "NoCredentialsError",
        "NonRetryableError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "RefreshError",
        "SSOTokenLoadError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
    }
)
_ALWAYS_FAILING = frozenset(
    {
        "FileExpired",
        "InvalidRegionError",
        "NoRegionError",
        "ParamValidationError",
        "UnsupportedSignatureVersionError",
    }
)
_PASSING_CODES = frozenset(
    {
        "ConditionalRequestConflict",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
    }
)
_PASSING_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_BY_STATUS: dict[int, Meaning] = {
    401: "denied",
    403: "denied",
    404: "missing",
    412: "exists",
    501: "unsupported",
}
_BY_TYPE: tuple[tuple[type[Exception], Meaning], ...] = (
    (FileExistsError, "exists"),
    (FileNotFoundError, "missing"),
    (IsADirectoryError, "missing"),
    (PermissionError, "denied"),
    (ValueError, "wrong"),
)

_SECRETS = (
    # The query of a URL holds its signature.
    (re.compile(r"(\bhttps?://[^\s\"'<>?]+)\?[^\s\"'<>]*"), r"\1"),
    (re.compile(r"(//)[^/@\s]+@"), r"\1"),
    (re.compile(r"\b(?:AKIA|ASIA|GOOG)[A-Z0-9]{8,}\b"), "***"),
    (re.compile(r"(?i)\b(bearer)\s+\S+"), r"\1 ***"),
    (
        re.compile(
            r"(?i)\b([\w-]*(?:secret|token|password|signature|credential|access-?_?key)[\w-]*"
            r"[\"']?\s*[=:]\s*)[^\s,;&]+"
        ),
        r"\1***",
    ),
)
_LONGEST = 300


def meaning(error: Exception) -> Meaning | None:
    """What an error means; None if it is not of a file system, but a bug of ours."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _NO_CREDENTIALS:
        return "denied"
    if names & _ALWAYS_FAILING:
        return "wrong"
    status, code = _answer(error)
    text = str(error)
    if code == "NoSuchBucket" or "bucket does not exist" in text.lower():
        return "no bucket"
    if code in _PASSING_CODES or status in _PASSING_STATUS:
        return "passing"
    # gcsfs has no type of its own for it.
    if status in _BY_STATUS or text.startswith("Forbidden: "):
        return _BY_STATUS.get(status or 403, "denied")
    return _by_type(error, is_refused=status is not None)


def reason(error: Exception) -> str:
    """The error in one line, without credentials."""
    status, code = _answer(error)
    text = getattr(error, "strerror", None) or str(error)
    line = next(iter(str(text).splitlines()), "").strip()
    for pattern, replacement in _SECRETS:
        line = pattern.sub(replacement, line)
    if len(line) > _LONGEST:
        line = f"{line[:_LONGEST]}..."
    answer = " ".join(str(part) for part in (status, code) if part and str(part) not in line)
    return f"{line} ({answer})" if line and answer else line or answer or type(error).__name__


def _by_type(error: Exception, *, is_refused: bool) -> Meaning | None:
    for kind, found in _BY_TYPE:
        if isinstance(error, kind):
            return found
    if isinstance(error, OSError) and error.errno == errno.ENOSYS:
        return "unsupported"
    is_theirs = any(kind.__module__.split(".")[0] in _LIBRARIES for kind in type(error).__mro__)
    if not (isinstance(error, OSError) or is_theirs):
        return None
    return "wrong" if is_refused else "passing"


def _answer(error: Exception) -> tuple[int | None, str | None]:
    """Status and code of the answer that an error was made from."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            details = response.get("Error", {})
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = str(details.get("Code", "")) or None
            if code is not None and code.isdecimal():
                # A HEAD has no body, so that its status stands for the code.
                return status or int(code), None
            return status, code
        for name in ("status", "code"):
            value = getattr(cause, name, None)
            if isinstance(value, int | str) and str(value).isdecimal():
                return int(value), None
        cause = cause.__cause__
    return None, None
