"""Checks a machine that has an NVIDIA GPU, in six minutes, with numpy, JAX and this tree alone.

    python scripts/check_gpu.py                                # everything
    python scripts/check_gpu.py --only kernels --seconds 120
    python scripts/check_gpu.py --tiny                         # does the check itself run? CPUs do

Sections, in order of importance:

    kernels     every configuration of the attention kernels against float64
    bandwidth   bytes per second of decode attention as a share of a copy's, beside JAX's bundled
                kernel and cuDNN
    engine      whole engines in the shapes of Llama 1B and 8B: tokens per second against the floor
                that the memory's speed sets, peak memory against the plan

Prints a table for each section and writes a JSON file, anew after each case. What there was no time
for is in both, as are the packages that a stand-in was used for (see `stand_ins.py`). The exit
status is 1 if a result was wrong or anything of this project failed or hung; 2 if there is no GPU,
or the arguments are wrong; 3 if nothing failed because nothing was checked.

Cases run in a process of their own, which is replaced when it dies, hangs or loses the device.
Knows nothing of what they do: only what `case_stream.py` tells.
"""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import platform
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

ROOT = pathlib.Path(__file__).resolve().parents[1]
SECTIONS = {"kernels": 4, "bandwidth": 3, "engine": 5}
"""And shares of the time; what one leaves, those behind it have."""
SECONDS = 330.0
GRACE_SECONDS = 10.0
"""That a process has beyond its time, or to leave when it has told all, before it is ended."""
CASE_SECONDS = 60.0
"""Without a word from a process, compiling included: it hangs. A whole engine tells more often."""
MOST_THREADS = 8
NO_GPU = 2
NOTHING_CHECKED = 3
MOST_STRAYS = 20
STRAY_CHARACTERS = 200
TAIL_CHARACTERS = 2000

Event = dict[str, Any]


@dataclasses.dataclass(kw_only=True)
class Section:
    """What is known of a section.

    Attributes:
        cases: What came out, failed or was left out, by case.
        names: All cases, and whether a failure is this project's.
        phases: Of cases that tell how far they are.
        strays: Lines among what was told that tell nothing, or are cut off.
        seconds: That it took.
    """

    cases: dict[str, Event] = dataclasses.field(default_factory=dict)
    names: dict[str, bool] = dataclasses.field(default_factory=dict)
    phases: dict[str, list[Event]] = dataclasses.field(default_factory=dict)
    strays: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def failed(self) -> list[str]:
        """Cases of this project that came out wrong or did not come out."""
        return [
            name
            for name, found in self.cases.items()
            if self.names.get(name, True) and ("error" in found or found.get("passed") is False)
        ]

    def left_out(self) -> dict[str, str]:
        """Cases that were not run, and why."""
        return {
            name: found["left_out"] for name, found in self.cases.items() if "left_out" in found
        }

    def errors(self) -> dict[str, str]:
        """Cases that did not come out, and why."""
        return {name: found["error"] for name, found in self.cases.items() if "error" in found}


@dataclasses.dataclass(kw_only=True)
class Report:
    """What is written; complete after each case.

    Attributes:
        path: Of the JSON file.
        head: What ran where.
        sections: By name.
    """

    path: pathlib.Path
    head: Event
    sections: dict[str, Section] = dataclasses.field(default_factory=dict)

    def write(self, status: str) -> None:
        """Replaces the file, whole."""
        found = {
            **self.head,
            "status": status,
            "failed": self.failed(),
            "left_out": {
                f"{section}: {name}": reason
                for section, known in self.sections.items()
                for name, reason in known.left_out().items()
            },
            "sections": {
                name: {
                    "seconds": round(section.seconds, 1),
                    "cases": section.cases,
                    "phases": section.phases,
                    "strays": section.strays,
                }
                for name, section in self.sections.items()
            },
        }
        aside = self.path.with_name(self.path.name + ".new")
        aside.write_text(json.dumps(found, indent=1) + "\n")
        aside.replace(self.path)

    def failed(self) -> list[str]:
        """All cases of this project that came out wrong or did not come out."""
        return [
            f"{name}: {case}"
            for name, section in self.sections.items()
            for case in section.failed()
        ]

    def has_checked(self) -> bool:
        """Whether any case of this project was run to an end, good or bad."""
        return any(
            section.names.get(name, True) and ("passed" in found or "error" in found)
            for section in self.sections.values()
            for name, found in section.cases.items()
        )


class NoGpu(Exception):
    """The device is not one that is checked."""


@dataclasses.dataclass(kw_only=True)
class Run:
    """A process that runs cases.

    Attributes:
        lines: What it tells, as it does.
        status: Its exit status, when it has ended.
        errors: The end of its standard error, when it has ended.
        is_stopped: It did not end by itself: it was silent for too long, or its time was over.
    """

    lines: Iterable[str]
    status: int | None = None
    errors: str = ""
    is_stopped: bool = False


@contextlib.contextmanager
def child(job: Event, seconds: float, silence: float) -> Iterator[Run]:
    """A process that does the job, ended when its time is over or it tells nothing for long."""
    ends = time.monotonic() + seconds
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command_of(job), stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
        )
        told: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # A pipe cannot be waited on for some time only, a queue can.
        reader = threading.Thread(target=_read, args=(process.stdout, told), daemon=True)
        reader.start()
        run = Run(lines=())
        run.lines = _lines(told, run, ends, silence)
        try:
            yield run
        finally:
            if run.is_stopped or sys.exc_info()[0] is not None:
                process.kill()
            try:
                run.status = process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                run.status = process.wait()
            reader.join(GRACE_SECONDS)
            errors.seek(0)
            run.errors = " ".join(errors.read()[-TAIL_CHARACTERS:].split())


def command_of(job: Event) -> list[str]:
    """This script, as the process that does the job."""
    return [sys.executable, __file__, "--child", json.dumps(job)]


def _read(stdout: TextIO, told: queue.SimpleQueue[str | None]) -> None:
    with stdout:
        for line in stdout:
            told.put(line)
    told.put(None)


def _lines(
    told: queue.SimpleQueue[str | None], run: Run, ends: float, silence: float
) -> Iterator[str]:
    """What is told, until the end or until it takes too long."""
    while True:
        try:
            line = told.get(timeout=max(0.0, min(silence, ends - time.monotonic())))
        except queue.Empty:
            run.is_stopped = True
            return
        if line is None:
            return
        yield line


Start = Callable[[Event, float, float], contextlib.AbstractContextManager[Run]]


def run_section(
    name: str, report: Report, *, is_tiny: bool, ends: float, start: Start = child
) -> Section:
    """Runs cases in one process after the other until all are done or time is over.

    Args:
        name: Of the section.
        report: Takes it, and is written after each case.
        is_tiny: Take small shapes.
        ends: When to stop, in seconds of `time.monotonic`.
        start: Makes a process, which has so many seconds, and so many without a word.

    Raises:
        NoGpu: There is none, and the cases are not the small ones.
    """
    section = report.sections[name] = Section()
    num_together, started = MOST_THREADS, time.monotonic()
    suspects: list[str] = []
    what = ""
    cut_off: dict[str, Event] = {}
    rest, is_over = "no time left", False
    while not is_over and (seconds := ends - time.monotonic()) > 0:
        job: Event = {
            "section": name,
            "seconds": seconds,
            "is_tiny": is_tiny,
            "done": list(section.cases),
            "num_together": num_together,
        }
        blamed: list[str] = []
        ending, heard = None, time.monotonic()
        with start(job, seconds + GRACE_SECONDS, CASE_SECONDS) as run:
            for line in run.lines:
                event = _event(line, section)
                blamed = event.get("starts", blamed)
                _take(event, section, report, blamed)
                section.seconds = time.monotonic() - started
                report.write("running")
                heard = time.monotonic()
                ending = event.get("ended")
                if ending is not None:
                    break
            silent = time.monotonic() - heard
        if ending is not None:
            is_over = ending in ("done", "no time")
            continue
        blamed = [case for case in blamed if case not in section.cases]
        told = [phase["phase"] for case in blamed for phase in section.phases.get(case, [])]
        behind = f" behind {', '.join(told)}" if told else ""
        if run.is_stopped and silent < CASE_SECONDS:
            # The section's clock ended it; slow or stuck, it had less than a case may take.
            is_over = True
            if len(blamed) == 1:
                cut_off = {blamed[0]: {"left_out": f"no time left, it was ended{behind}"}}
            continue
        died = (
            f"it hung for {silent:.0f} s{behind}"
            if run.is_stopped
            else f"the process ended with status {run.status}: {run.errors}"
        )
        if len(blamed) == 1:
            section.cases[blamed[0]] = {"error": died}
        elif blamed:
            # One of those that were being compiled is to blame: one at a time from here on.
            num_together, suspects, what = 1, blamed, died
        elif len(section.cases) > len(job["done"]):
            # Between two cases. Another process goes on, and there is an end to that: it did some.
            section.cases[f"process behind {list(section.cases)[-1]}"] = {"error": died}
        else:
            # It would end the same way again.
            section.cases["process"] = {"error": died}
            rest, is_over = died, True
    unknown = [
        case for case in suspects if case not in section.cases and section.names.get(case, True)
    ]
    if unknown and not any(case in section.errors() for case in suspects):
        # Time was over before it was clear which.
        section.cases["process"] = {"error": f"one of {'; '.join(suspects)}: {what}"}
    section.cases.update(cut_off)
    for case in section.names or ([] if section.cases else ["all cases"]):
        section.cases.setdefault(case, {"left_out": rest})
    section.seconds = time.monotonic() - started
    report.write("running")
    return section


def _event(line: str, section: Section) -> Event:
    """What a line tells; of one that is not an event, nothing."""
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if isinstance(event, dict):
        return event
    if len(section.strays) < MOST_STRAYS:
        section.strays.append(line.strip()[:STRAY_CHARACTERS])
    return {}


def _take(event: Event, section: Section, report: Report, blamed: list[str]) -> None:
    """Puts what a process told where it belongs."""
    if "device" in event:
        for key, value in event.items():
            report.head.setdefault(key, value)
    elif "no_gpu" in event:
        raise NoGpu(event["no_gpu"])
    elif "cases" in event:
        section.names = event["cases"]
    elif "left_out" in event:
        section.cases[event["left_out"]] = {"left_out": event["reason"]}
    elif "case" in event:
        section.cases[event.pop("case")] = event
    elif "phase" in event and blamed:
        section.phases.setdefault(blamed[0], []).append(event)


def print_section(name: str, section: Section) -> None:
    """Prints what came out, what failed, and what was left out."""
    print(f"\n{name}: {len(section.cases)} cases, {section.seconds:.0f} s")
    results = {case: found for case, found in section.cases.items() if "passed" in found}
    pivots = {case: found for case, found in results.items() if "cell" in found}
    if pivots:
        print_pivot(pivots)
    listed = {
        case: {key: value for key, value in found.items() if _is_short(value)}
        for case, found in results.items()
        if case not in pivots
    }
    for keys, rows in _alike(listed):
        print_table([["case", *keys], *([case, *map(_text, row.values())] for case, row in rows)])
    for case, found in results.items():
        for fault in found.get("faults", []):
            print(f"  WRONG {case}: {fault}")
    for case, error in section.errors().items():
        is_ours = section.names.get(case, True)
        print(f"  {'FAILED' if is_ours else 'not measured'} {case}: {error[:300]}")
    reasons = collections.defaultdict(list)
    for case, reason in section.left_out().items():
        reasons[reason].append(case)
    for reason, cases in reasons.items():
        shown = "; ".join(cases[:6]) + (f"; and {len(cases) - 6} more" if len(cases) > 6 else "")
        print(f"  left out, {reason[:300]}: {shown}")
    for line in section.strays:
        print(f"  not understood: {line}")


def _is_short(value: object) -> bool:
    return isinstance(value, int | float | str | None)


def _alike(listed: dict[str, Event]) -> Iterator[tuple[list[str], list[tuple[str, Event]]]]:
    """Cases with the same figures, together."""
    groups: dict[tuple[str, ...], list[tuple[str, Event]]] = {}
    for case, found in listed.items():
        groups.setdefault(tuple(found), []).append((case, found))
    for keys, rows in groups.items():
        yield list(keys), rows


def print_pivot(found: dict[str, Event]) -> None:
    """A row for each shape, a column for each implementation."""
    columns = list(dict.fromkeys(case["column"] for case in found.values()))
    rows: dict[str, dict[str, str]] = {}
    for case in found.values():
        rows.setdefault(case["row"], {})[case["column"]] = case["cell"]
    print("share of a copy's bytes per second; * may come from a cache, ! is a wrong result")
    table = [["shape", *columns]]
    table += [[name, *(row.get(column, "-") for column in columns)] for name, row in rows.items()]
    print_table(table)


def print_table(rows: list[list[str]]) -> None:
    """Prints columns; a table of few rows that is wide is turned on its side."""
    if len(rows) <= 3 and len(rows[0]) > 8:
        rows = [list(column) for column in zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  " + "  ".join([row[0].ljust(widths[0]), *cells]))


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def commit() -> str | None:
    """The tree's commit, if git knows it."""
    try:
        said = [
            subprocess.run(
                ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return said[0] + (" with changes" if said[1] else "")


def driver() -> str | None:
    """What the NVIDIA driver says of itself."""
    try:
        return pathlib.Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def main() -> int:
    """Runs the sections; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=pathlib.Path, default=pathlib.Path("check_gpu.json"), metavar="FILE"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--tiny", action="store_true", help="small shapes, which CPUs take, too")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        run_child(options.child)
        return 0
    folder = options.json.absolute().parent
    if not folder.is_dir():
        parser.error(f"--json {options.json}: there is no folder {folder}")
    if options.json.is_dir():
        parser.error(f"--json {options.json}: it is a folder, not a file")
    started = time.monotonic()
    report = Report(
        path=options.json,
        head={
            "command": shlex.join([pathlib.Path(sys.executable).name, *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "driver": driver(),
            "python": platform.python_version(),
            "is_tiny": options.tiny,
            "seconds_allowed": options.seconds,
        },
    )
    chosen = [name for name in SECTIONS if name in options.only]
    for index, name in enumerate(chosen):
        left = started + options.seconds - time.monotonic() - GRACE_SECONDS
        share = SECTIONS[name] / sum(SECTIONS[other] for other in chosen[index:])
        ends = time.monotonic() + left * share
        try:
            section = run_section(name, report, is_tiny=options.tiny, ends=ends)
        except NoGpu as reason:
            print(f"{reason}; --tiny tries the check itself on any device", file=sys.stderr)
            return NO_GPU
        if not index:
            print_head(report.head)
        print_section(name, section)
    failed = report.failed()
    report.head["seconds"] = round(time.monotonic() - started, 1)
    verdict, status = "nothing failed", 0
    if failed:
        verdict, status = f"FAILED: {'; '.join(failed)}", 1
    elif not report.has_checked():
        verdict, status = "nothing was checked", NOTHING_CHECKED
    report.write("done" if status != NOTHING_CHECKED else verdict)
    num_left_out = sum(len(section.left_out()) for section in report.sections.values())
    print(f"\n{verdict}; {num_left_out} cases left out; {report.head['seconds']} s; {report.path}")
    return status


def print_head(head: Event) -> None:
    """Prints what ran where."""
    for key, value in head.items():
        shown = ", ".join(value) or "none" if isinstance(value, list) else _text(value)
        print(f"{key:>20}: {shown}")


def run_child(job: Event) -> None:
    """Runs the cases of a section that are not done, in this process."""
    # This tree, not one that may be installed; the named shapes of its tests behind all else.
    sys.path.insert(1, str(ROOT))
    sys.path.append(str(ROOT / "tests"))
    import jax
    import stand_ins

    missing = stand_ins.install()

    import case_stream

    case_stream.take_stdout()
    deadline = case_stream.Deadline(job["seconds"])
    device = jax.devices()[0]
    if device.platform != "gpu" and not job["is_tiny"]:
        case_stream.tell({"no_gpu": f"JAX's device is a {device.platform}, not an NVIDIA GPU"})
        return
    case_stream.tell(describe(missing))
    # The sections load what may have to be stood in for.
    match job["section"]:
        case "kernels":
            import check_kernels

            found = list(check_kernels.cases(is_tiny=job["is_tiny"]))
        case "bandwidth":
            import check_bandwidth

            found = list(check_bandwidth.cases(is_tiny=job["is_tiny"]))
        case _:
            import check_engine

            found = list(check_engine.cases(deadline, is_tiny=job["is_tiny"]))
    case_stream.tell({"cases": {case.name: case.is_ours for case in found}})
    case_stream.run_cases(
        found,
        done=job["done"],
        deadline=deadline,
        num_together=job["num_together"],
        is_alive=is_alive,
    )


def describe(missing: tuple[str, ...]) -> Event:
    """The device, the versions and the packages that were stood in for."""
    import jax
    import numpy as np

    device = jax.devices()[0]
    used = device.memory_stats() or {}
    return {
        "device": device.device_kind,
        "platform": " ".join(device.client.platform_version.split()),
        "compute_capability": getattr(device, "compute_capability", None),
        "memory_for_jax": used.get("bytes_limit"),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "numpy": np.__version__,
        "stand_ins": list(missing),
    }


def is_alive() -> bool:
    """Whether the device still computes."""
    import jax
    import jax.numpy as jnp

    try:
        return float(jax.block_until_ready(jnp.arange(8.0) + 1).sum()) == 36.0
    except Exception:  # a lost device may raise anything
        return False


if __name__ == "__main__":
    sys.exit(main())
