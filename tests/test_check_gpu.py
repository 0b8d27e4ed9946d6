"""The check for machines with a GPU, as far as it runs without: it needs nothing but JAX, it
notices what is wrong, and it loses nothing when a process dies."""

import contextlib
import functools
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NO_WINDOW

SCRIPTS = pathlib.Path(__file__).resolve().parents[1] / "scripts"
CHECK = SCRIPTS / "check_gpu.py"
PACKAGES = ["jaxtyping", "flax", "tokenizers", "jinja2", "platformdirs"]
"""That the engine loads, besides numpy and JAX."""
OTHERS = [
    "click",
    "rich",
    "yaml",
    "pydantic",
    "pyarrow",
    "fsspec",
    "beartype",
    "gguf",
    "safetensors",
]

BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {PACKAGES + OTHERS}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""
"""Python runs a file of the name `sitecustomize.py` when it starts, if it finds one."""


@pytest.fixture
def script(monkeypatch):
    """Loads one of the check's modules, by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def check(*arguments: str | pathlib.Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the check on the CPU, with what other tests compiled."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return subprocess.run(
        [sys.executable, str(CHECK), *map(str, arguments)],
        env={"PATH": os.defpath, "JAX_PLATFORMS": "cpu", **cache, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def test_it_runs_without_any_package_but_jax_and_gives_the_same_tokens(tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    path = tmp_path / "check.json"
    ran = check("--tiny", "--json", path, PYTHONPATH=str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(path.read_text())
    assert found["stand_ins"] == PACKAGES
    assert found["status"] == "done"
    assert not found["failed"]
    assert not found["left_out"]
    assert list(found["sections"]) == ["kernels", "bandwidth", "engine"]
    for section in found["sections"].values():
        assert all(case["passed"] for case in section["cases"].values())
    assert "nothing failed; 0 cases left out" in ran.stdout
    assert ", ".join(PACKAGES) in ran.stdout
    engine = found["sections"]["engine"]["cases"]["tiny"]
    assert engine["implementation"] == "triton_interpreted"
    assert engine["decode_steps"] > 0
    # The same with all packages, flax above all.
    ran = check("--tiny", "--only", "engine", "--json", path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(path.read_text())
    assert not found["stand_ins"]
    with_flax = found["sections"]["engine"]["cases"]["tiny"]
    assert [len(tokens) for tokens in with_flax["tokens"]] == [4, 4, 4, 4]
    for figure in ("tokens", "weight_bytes_read_by_a_decode_step", "decode_floor_bytes"):
        assert engine[figure] == with_flax[figure]


def test_a_machine_without_a_gpu_is_told_so(tmp_path) -> None:
    ran = check("--json", tmp_path / "check.json")
    assert ran.returncode == 2
    assert "JAX's device is a cpu, not an NVIDIA GPU; --tiny tries the check itself" in ran.stderr


def test_no_time_leaves_everything_out_and_says_so(tmp_path) -> None:
    ran = check("--tiny", "--seconds", "0", "--json", tmp_path / "check.json")
    assert ran.returncode == 3
    assert ran.stdout.count("left out, no time left: all cases") == 3
    assert ran.stdout.splitlines()[-1].startswith("nothing was checked; 3 cases left out")
    assert json.loads((tmp_path / "check.json").read_text())["status"] == "nothing was checked"


def test_a_file_that_cannot_be_written_is_an_error_before_all_else(tmp_path) -> None:
    for path, error in (
        (tmp_path / "absent" / "check.json", f"there is no folder {tmp_path / 'absent'}"),
        (tmp_path, "it is a folder, not a file"),
    ):
        ran = check("--tiny", "--json", path)
        assert ran.returncode == 2
        assert f"error: --json {path}: {error}" in ran.stderr
        assert not ran.stdout


def test_float64_attention_is_the_references(script) -> None:
    check_kernels = script("check_kernels")
    configuration = check_kernels.TINY[-1]
    assert configuration.query_dtype == "float32"
    for cap in (None, 2.0):
        wanted = check_kernels.lengths(16, is_tiny=cap is not None)
        prepared = check_kernels.prepare(configuration, "xla", wanted, cap)
        found = check_kernels.compare(configuration, prepared)
        assert found["passed"], found["faults"]
        assert max(found["decode"], found["prefill"]) < 0.3


def rounded_to_tf32(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + jnp.uint32(2**12)) & jnp.uint32(2**32 - 2**13)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def test_products_in_tf32_are_noticed(script) -> None:
    check_kernels = script("check_kernels")
    kernel_configurations = script("kernel_configurations")
    configuration = kernel_configurations.Configuration(
        query_dtype="float32", kv_dtype="float32", head_dim=64, num_heads=4, num_kv_heads=2
    )
    wanted = check_kernels.lengths(16, is_tiny=False)
    decode, _ = check_kernels.prepare(configuration, "xla", wanted)
    _, problem = decode.problems[0]
    rounded = problem.keys._replace(values=rounded_to_tf32(problem.keys.values))
    arguments = problem.arguments | {"q": rounded_to_tf32(problem.arguments["q"])}
    result = decode.call(rounded, problem.values, arguments)
    assert check_kernels.worst(problem, result, "float32") > 3


@pytest.mark.parametrize("fault", ["zeros", "nan", "unused", "window", "blind"])
def test_a_wrong_kernel_is_noticed(script, fault: str) -> None:
    check_kernels = script("check_kernels")
    configuration = check_kernels.TINY[0]
    decode, _ = check_kernels.prepare(configuration, "xla", check_kernels.lengths(16, is_tiny=True))
    expected = decode.call(*decode.problems[0][1][1:3], decode.problems[0][1].arguments)

    def wrong(k, v, arguments: dict[str, Any]) -> jax.Array:
        right = decode.call(k, v, arguments)
        match fault:
            case "zeros":
                return jnp.zeros_like(right)
            case "nan":
                return right.at[-check_kernels.UNUSED - 1, 0, 0].set(jnp.nan)
            case "unused":
                return right.at[-1, 0, 0].set(1)
            case "window":
                # One key too few.
                return decode.call(k, v, arguments | {"window": arguments["window"] - 1})
            case _:
                # The answer by heart, whatever keys and values are.
                return expected

    found = check_kernels.compare(configuration, [decode._replace(call=wrong)])
    assert not found["passed"]
    if fault == "blind":
        assert "decode, keys and values swapped: only 0." in found["faults"][-1]


def test_a_large_pool_is_laid_out_as_its_block_table_says(script) -> None:
    check_kernels = script("check_kernels")
    for configuration in script("kernel_configurations").CONFIGURATIONS:
        is_large = configuration.kv_dtype in check_kernels.LARGE_BYTES
        if is_large and check_kernels.is_usual(configuration):
            problem = check_kernels.large_problem(configuration, 2**23, 300)
            call = check_kernels.compiled(
                check_kernels.pallas_kernels.decode_attention, problem, configuration, "xla", None
            )
            result = call(problem.keys, problem.values, problem.arguments)
            assert check_kernels.worst(problem, result, "bfloat16") <= 1
            ids = np.unique(problem.arguments["block_tables"])
            assert ids.max() > 0.9 * problem.keys.values.shape[1]


def told(capsys) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def run_cases(
    case_stream: types.ModuleType, cases, *, done=(), seconds: float = 100.0, is_alive: bool = True
) -> None:
    case_stream.run_cases(
        cases,
        done=done,
        deadline=case_stream.Deadline(seconds),
        num_together=4,
        is_alive=lambda: is_alive,
    )


def test_one_failure_does_not_stop_the_next_case(script, capsys) -> None:
    case_stream = script("case_stream")

    def fail(_: None) -> dict[str, object]:
        raise RuntimeError("an illegal access")

    def leave_out() -> None:
        raise case_stream.LeftOut("it is not there")

    cases = [
        case_stream.Case(name="done before", run=fail),
        case_stream.Case(name="fails", run=fail),
        case_stream.Case(name="absent", prepare=leave_out, run=fail),
        case_stream.Case(name="works", prepare=lambda: 3, run=lambda n: {"passed": n == 3}),
        case_stream.Case(name="alone", run=lambda _: {"passed": True}, is_alone=True),
        case_stream.Case(name="last", run=lambda _: {"passed": True}),
    ]
    run_cases(case_stream, cases, done=("done before",))
    events = told(capsys)
    assert events[0] == {"starts": ["fails", "absent", "works"]}
    (failed,) = (event for event in events if event.get("case") == "fails")
    assert failed["error"] == "RuntimeError: an illegal access"
    assert {"left_out": "absent", "reason": "it is not there"} in events
    assert [event["case"] for event in events if event.get("passed")] == ["works", "alone"]
    assert events[-1] == {"ended": "fresh process"}
    run_cases(case_stream, cases, is_alive=False)
    assert told(capsys)[-1] == {"ended": "device lost"}
    run_cases(case_stream, cases, seconds=0)
    assert told(capsys) == [{"ended": "no time"}]


@contextlib.contextmanager
def scripted(check_gpu: types.ModuleType, jobs: list[dict[str, Any]], job, seconds, silence):
    """A process in which `bad` kills the compiler and `hangs` the time."""
    jobs.append(job)
    todo = [name for name in ("good", "bad", "fine", "hangs") if name not in job["done"]]
    events: list[dict[str, Any]] = [
        {"cases": dict.fromkeys(("good", "bad", "fine", "hangs"), True)}
    ]
    run = check_gpu.Run(lines=[])
    groups = [todo] if job["num_together"] > 1 else [[name] for name in todo]
    for group in groups:
        events.append({"starts": group})
        if "bad" in group:
            break
        if "hangs" in group:
            # The test's time is over then.
            events.append({"phase": "warm_up", "seconds": 1.0})
            time.sleep(max(0.0, seconds - check_gpu.GRACE_SECONDS))
            break
        events += [{"case": name, "passed": True} for name in group]
    run.lines = map(json.dumps, events)
    yield run
    run.is_stopped = "phase" in events[-1]
    run.status = -signal.SIGKILL if run.is_stopped else -signal.SIGABRT
    run.errors = "LLVM is out of words"


def test_a_case_that_kills_its_process_is_found_and_the_rest_is_run(script, tmp_path) -> None:
    check_gpu = script("check_gpu")
    jobs: list[dict[str, Any]] = []
    report = check_gpu.Report(path=tmp_path / "check.json", head={"device": "none"})
    section = check_gpu.run_section(
        "kernels",
        report,
        is_tiny=True,
        ends=time.monotonic() + 1,
        start=functools.partial(scripted, check_gpu, jobs),
    )
    assert section.cases["bad"] == {
        "error": "the process ended with status -6: LLVM is out of words"
    }
    assert section.cases["good"] == section.cases["fine"] == {"passed": True}
    assert section.left_out() == {"hangs": "no time left, it was ended behind warm_up"}
    assert [job["num_together"] for job in jobs] == [8, 1, 1]
    assert jobs[-1]["done"] == ["good", "bad"]
    written = json.loads((tmp_path / "check.json").read_text())
    assert written["failed"] == ["kernels: bad"]
    assert written["left_out"] == {"kernels: hangs": "no time left, it was ended behind warm_up"}


TOLD = """
import sys, time
sys.path.insert(0, {scripts!r})
import case_stream
job = {job!r}
tell = case_stream.tell
names = [name for name in {names!r} if name not in job["done"]]
"""
"""How a process of the tests begins; what it does with the cases that are left is up to a test."""


def run_section(
    check_gpu: types.ModuleType, monkeypatch, tmp_path, body: str, *, names: list[str], **options
):
    """Runs a section in real processes of a few lines of Python."""
    jobs: list[dict[str, Any]] = []

    def command_of(job: dict[str, Any]) -> list[str]:
        jobs.append(job)
        text = TOLD.format(scripts=str(SCRIPTS), job=job, names=names)
        text += f'tell({{"cases": dict.fromkeys({names!r}, True)}})\n'
        return [sys.executable, "-c", text + body]

    monkeypatch.setattr(check_gpu, "command_of", command_of)
    for name, value in options.items():
        monkeypatch.setattr(check_gpu, name, value)
    report = check_gpu.Report(path=tmp_path / "check.json", head={})
    ends = time.monotonic() + 60
    section = check_gpu.run_section("kernels", report, is_tiny=True, ends=ends)
    return section, report, jobs


HANGS = """
tell({"starts": names})
for name in names:
    tell({"starts": [name]})
    if name == "hangs":
        tell({"phase": "weights", "seconds": 1.0})
        time.sleep(100)
    tell({"case": name, "passed": True})
tell({"ended": "done"})
time.sleep(100)
"""


def test_a_case_that_hangs_has_failed_and_the_rest_is_run(script, monkeypatch, tmp_path) -> None:
    """The process that told everything hangs in the end, too, and costs little."""
    section, report, jobs = run_section(
        script("check_gpu"),
        monkeypatch,
        tmp_path,
        HANGS,
        names=["good", "hangs", "fine"],
        CASE_SECONDS=3.2,
        GRACE_SECONDS=0.1,
    )
    assert section.cases["hangs"] == {"error": "it hung for 3 s behind weights"}
    assert section.cases["good"] == section.cases["fine"] == {"passed": True}
    assert report.failed() == ["kernels: hangs"]
    assert [job["done"] for job in jobs] == [[], ["good", "hangs"]]


def stopped(check_gpu: types.ModuleType, first: float, job, seconds, silence):
    """A process that is stopped while it compiles several; the next ones by the clock."""

    @contextlib.contextmanager
    def process():
        group = ["a", "b", "c"] if job["num_together"] > 1 else ["a"]
        names = {"cases": {"a": True, "b": True, "c": False}}
        run = check_gpu.Run(lines=[], is_stopped=True, status=-signal.SIGKILL)

        def lines():
            yield from map(json.dumps, [names, {"starts": group}])
            time.sleep(first if job["num_together"] > 1 else 0)

        run.lines = lines()
        yield run

    return process()


def test_a_hang_among_several_whose_case_was_not_found_in_time_has_failed(
    script, monkeypatch, tmp_path
) -> None:
    check_gpu = script("check_gpu")
    monkeypatch.setattr(check_gpu, "CASE_SECONDS", 1.0)
    report = check_gpu.Report(path=tmp_path / "check.json", head={})
    start = functools.partial(stopped, check_gpu, 1.1)
    section = check_gpu.run_section(
        "kernels", report, is_tiny=True, ends=time.monotonic() + 60, start=start
    )
    assert section.cases["process"] == {"error": "one of a; b; c: it hung for 1 s"}
    assert section.left_out() == {
        "a": "no time left, it was ended",
        "b": "no time left",
        "c": "no time left",
    }
    assert report.failed() == ["kernels: process"]


STRAYS = """
import os
print("before", flush=True)
case_stream.take_stdout()
print("a library's warning", flush=True)
os.system("echo a compiler")
os.write(2, b"\\xff")
for name in names:
    tell({"starts": [name]})
    if name == "dies":
        os.write(case_stream._taken[0].fileno(), b'{"case": "dies", "pas')
        os.kill(os.getpid(), 9)
    tell({"case": name, "passed": True})
tell({"ended": "done"})
"""


def test_lines_that_are_no_events_are_noted_and_nothing_else(script, monkeypatch, tmp_path) -> None:
    section, report, jobs = run_section(
        script("check_gpu"), monkeypatch, tmp_path, STRAYS, names=["good", "dies", "fine"]
    )
    assert section.strays == ["before", '{"case": "dies", "pas', "before"]
    assert section.cases["dies"] == {
        "error": "the process ended with status -9: a library's warning a compiler \ufffd"
    }
    assert section.cases["good"] == section.cases["fine"] == {"passed": True}
    assert len(jobs) == 2
    report.write("done")
    written = json.loads(report.path.read_text())
    assert written["sections"]["kernels"]["strays"] == section.strays


DIES_BETWEEN = """
import os
for name in names[:2]:
    tell({"starts": [name]})
    tell({"case": name, "passed": True})
if names[2:]:
    os.kill(os.getpid(), 11)
tell({"ended": "done"})
"""


def test_a_process_that_dies_between_cases_is_replaced(script, monkeypatch, tmp_path) -> None:
    section, _, jobs = run_section(
        script("check_gpu"),
        monkeypatch,
        tmp_path,
        DIES_BETWEEN,
        names=list("abcde"),
    )
    died = {"error": "the process ended with status -11: "}
    assert section.cases.pop("process behind b") == section.cases.pop("process behind d") == died
    assert section.cases == {name: {"passed": True} for name in "abcde"}
    assert len(jobs) == 3


def test_one_that_dies_before_any_case_is_not_and_the_rest_says_why(
    script, monkeypatch, tmp_path
) -> None:
    section, report, jobs = run_section(
        script("check_gpu"),
        monkeypatch,
        tmp_path,
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
        names=list("ab"),
    )
    died = "the process ended with status -11: "
    assert section.cases["process"] == {"error": died}
    assert section.left_out() == {"a": died, "b": died}
    assert report.failed() == ["kernels: process"]
    assert len(jobs) == 1


def test_only_cases_of_this_project_count_as_checked(script, tmp_path) -> None:
    check_gpu = script("check_gpu")
    report = check_gpu.Report(path=tmp_path / "check.json", head={})
    section = report.sections["bandwidth"] = check_gpu.Section(names={"ours": True, "jax": False})
    section.cases = {"jax": {"error": "it is not there"}, "ours": {"left_out": "no time left"}}
    assert not report.has_checked()
    section.cases["ours"] = {"passed": False}
    assert report.has_checked()


def test_decode_steps_faster_than_the_memory_are_a_fault(script) -> None:
    check_engine = script("check_engine")
    assert check_engine.floor_faults(0.9, 1.0) == check_engine.floor_faults(0.0, 0.0) == []
    (fault,) = check_engine.floor_faults(0.8, 1.0)
    assert fault.startswith("decode took 0.800 of its floor: ")


def test_an_engine_that_compiles_gives_signs_of_life(script, monkeypatch, capsys) -> None:
    check_engine = script("check_engine")
    monkeypatch.setattr(check_engine, "BEAT_SECONDS", 0.01)
    with check_engine.beating():
        time.sleep(0.2)
    assert {"compiles": True} in told(capsys)


def test_a_stand_in_says_what_is_missing_when_it_is_called(script) -> None:
    stand_ins = script("stand_ins")
    module = stand_ins._InertModule("jinja2.sandbox")

    class Environment(module.ImmutableSandboxedEnvironment):
        pass

    with pytest.raises(ModuleNotFoundError, match=r"Sandbox\w+ was called, and jinja2 is not"):
        Environment()


def test_the_stand_in_for_flax_takes_modules_apart_and_puts_them_together(script) -> None:
    nnx = script("stand_ins")

    class Part(nnx.Module):
        def __init__(self, size: int) -> None:
            self.size = size
            self.kernel = nnx.Param(jnp.arange(size))
            self.bias = None

    class Whole(nnx.Module):
        def __init__(self) -> None:
            self.parts = nnx.List([Part(size) for size in range(1, 12)])
            self.scale = nnx.Param(jnp.ones(2))

    graph, state = nnx.split(nnx.eval_shape(Whole))
    flat = nnx.to_flat_state(state)
    assert [path for path, _ in flat][-2:] == [("parts", 10, "kernel"), ("scale",)]
    ones = [(path, param.replace(jnp.ones(param.get_value().shape))) for path, param in flat]
    again = nnx.merge(graph, jax.tree.map(lambda x: x + 1, nnx.from_flat_state(ones)))
    assert [part.size for part in again.parts] == list(range(1, 12))
    assert again.parts[10].kernel[...].tolist() == [2.0] * 11
    assert again.parts[0].bias is None
    assert isinstance(again.parts[0], Part)


def test_windows_and_lengths_meet_the_edges(script) -> None:
    """Blocks, tiles of 64 keys and partitions of 256."""
    wanted = script("check_kernels").lengths(32, is_tiny=False)
    assert {1, 31, 32, 33, 63, 64, 65, 255, 256, 257} <= set(wanted.decode)
    ends = {position + length for position, length in wanted.segments}
    assert {1, 33, 65, 256} <= ends
    assert NO_WINDOW in wanted.windows
