"""The child processes in which a gate compiles, and what passes between them and the gate.

A child compiles for one card, and prints JSON objects, one a line: the versions of JAX and ptxas;
`{"starts": CASE}` before each case; then what it found, each with its `"case"`, or
`{"case": CASE, "error": TEXT}`. It may die on the way: some instructions that a card does not have
end the compiler's process. What it printed until then counts.
"""

import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import click

SCRIPTS = pathlib.Path(__file__).resolve().parent
CHILD_SECONDS = 900
LOG_CHARACTERS = 1500
ERROR_CHARACTERS = 400

Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report(Generic[Found]):
    """What a child had to say.

    Attributes:
        versions: Of JAX and ptxas; empty if it did not come that far.
        found: About cases that compiled.
        errors: Why a case did not compile, by its name.
        crash: How the process ended before it was done, and during which case.
    """

    versions: dict[str, str]
    found: tuple[Found, ...]
    errors: dict[str, str]
    crash: str | None


def read_report(
    out: str, log: str, status: int, read: Callable[[dict[str, Any]], Found]
) -> Report[Found]:
    """The report of a child, from what it printed, its log and its exit status.

    Args:
        out: Its standard output.
        log: Its standard error.
        status: Not 0 if it ended before it was done.
        read: Makes of an object that it printed about a case what the gate looks at.
    """
    versions: dict[str, str] = {}
    found: list[Found] = []
    errors: dict[str, str] = {}
    latest = "the first case"
    for line in out.splitlines():
        match item := json.loads(line):
            case {"starts": str(name)}:
                latest = name
            case {"error": str(text), "case": str(name)}:
                errors[name] = text
            case {"case": _}:
                found.append(read(item))
            case {"jax": str(jax), "ptxas": str(ptxas)}:
                versions = {"jax": jax, "ptxas": ptxas}
    crash = None
    if status:
        # A compiler's stack of nameless functions is mostly empty lines.
        lines = (line for line in log.splitlines() if line.strip())
        tail = "\n".join(lines)[-LOG_CHARACTERS:] or "it left no message"
        crash = f"the process ended with status {status}, latest at {latest}: {tail}"
    return Report(versions=versions, found=tuple(found), errors=errors, crash=crash)


def run(
    script: str, card: str, cases: Iterable[str], *, read: Callable[[dict[str, Any]], Found]
) -> Report[Found]:
    """Compiles the cases for a card, in a process of its own.

    Args:
        script: Name of the child's file, beside this one.
        card: Name of the card.
        cases: Their names.
        read: As in `read_report`.

    Raises:
        click.ClickException: It takes too long.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, str(SCRIPTS / script), "--scratch", scratch, card, *cases]
        try:
            child = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=CHILD_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise click.ClickException(f"{card}: {error}") from error
    return read_report(child.stdout, child.stderr, child.returncode, read)


def run_all(
    script: str, wanted: Mapping[str, Iterable[str]], *, read: Callable[[dict[str, Any]], Found]
) -> dict[str, Report[Found]]:
    """The reports by card; of each card, the cases that are wanted."""
    # Each waits for its child; together they keep two cores busy.
    with ThreadPoolExecutor(len(wanted)) as executor:
        reports = executor.map(lambda item: run(script, *item, read=read), wanted.items())
        return dict(zip(wanted, reports, strict=True))


def say(item: dict[str, object]) -> None:
    """In the child: print an object at once, for the next case may end the process."""
    print(json.dumps(item), flush=True)


@contextlib.contextmanager
def said_failure(case: str) -> Iterator[None]:
    """In the child: whatever the compiler objects to in a case is said."""
    try:
        yield
    except Exception as error:  # it may raise anything
        text = f"{type(error).__name__}: {error}"
        say({"case": case, "error": " ".join(text.split())[:ERROR_CHARACTERS]})


scratch_option = click.option(
    "--scratch",
    type=click.Path(exists=True, file_okay=False, path_type=pathlib.Path),
    help="Where dumps go for a while; they stay there if the compiler ends the process.",
)
