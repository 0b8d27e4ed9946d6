"""Compiles the GPU kernels for one card, on a machine that needs no GPU, and measures the code.

One process compiles for one card only: a compiler that has made code for one has been seen to
hand it out for another. `compile_gate.py` runs this once for each card.

    python scripts/compile_target.py h100
    python scripts/compile_target.py l4 bfloat16/int4/d128/h32x8/s16

Needs the packages of `pip install '.[gpu-compile]'`. XLA compiles ahead of time from a description
of the card; its PTX is measured with the same ptxas that XLA itself uses. Nothing is run: neither
results nor speed are checked.

Prints JSON objects, one a line: the versions; `{"starts": CASE}` before each case; then one for
each kernel (`Measurement`), or `{"case": CASE, "error": TEXT}` for a case that does not compile.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import click
import gpu_targets
import jax
import jax.numpy as jnp
from gpu_targets import Target
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import triton as plt
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from pallas_kernels import KVRows, PrefillTiles, kv_format, triton
from pallas_kernels.kv_format import KVDType

ShapeOf = Callable[..., Any]
"""Makes what stands for an array on the card, from its shape and dtype."""
Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function to compile, and its arguments."""

KERNELS = ("paged_decode", "paged_combine", "paged_prefill")
DTYPES: tuple[tuple[str, KVDType], ...] = (
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float16"),
    ("bfloat16", "fp8"),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
    ("float32", "float32"),
)
HEAD_DIMS = (64, 96, 128, 256)

# Sizes that no kernel's code depends on.
LANES = 64
PREFILL_TOKENS = 512
TABLE_WIDTH = 256
NUM_BLOCKS = 1000
LAYERS = 2

THUNK = re.compile(
    r"(\w+) grid: \[[\d, ]+\] threads: \[(\d+), (\d+), (\d+)\]\s+shared_memory: (\d+) bytes"
)
ENTRY = re.compile(r"Compiling entry function '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
MOST_ERROR_CHARACTERS = 400


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Kernels that are compiled together.

    Attributes:
        name: Tells it from all others.
        kv_dtype: How keys and values are stored; with `head_dim` it finds the budget.
        head_dim: Numbers of a head.
        kernels: Names of those that must come out.
        programs: Makes what is to be compiled.
    """

    name: str
    kv_dtype: str
    head_dim: int
    kernels: tuple[str, ...]
    programs: Callable[[ShapeOf], list[Program]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What ptxas says of a kernel.

    Attributes:
        registers: Of a thread.
        spill_bytes: Written to memory and read back for want of registers.
        shared_bytes: Of static shared memory; that which is asked for at launch comes on top.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one kernel takes on one card.

    Attributes:
        case: Name of the case.
        kernel: Name of the kernel.
        arch: What the code is for.
        registers: Of a thread.
        spill_bytes: Written to memory and read back for want of registers.
        shared_bytes: Shared memory of a block.
        threads: Of a block.
        blocks_per_core: That an SM holds at once.
    """

    case: str
    kernel: str
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    blocks_per_core: int


def paged_case(
    query_dtype: str,
    kv_dtype: KVDType,
    head_dim: int,
    *,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    block_size: int = 16,
) -> Case:
    """Decode and prefill attention in one configuration."""

    def programs(shape: ShapeOf) -> list[Program]:
        int32 = functools.partial(shape, dtype=jnp.int32)
        # A GPU keeps 16-bit floats as what they are.
        stored, width, has_scales = kv_format.storage(kv_dtype, head_dim, as_bits=False)
        rows = (LAYERS, NUM_BLOCKS, block_size, num_kv_heads)
        pool = KVRows(
            shape((*rows, width), stored), shape(rows, jnp.float32) if has_scales else None
        )
        tables, scalar, lanes = int32((LANES, TABLE_WIDTH)), int32(()), int32((LANES,))

        def decode(q, k, v, layer, tables, token_lanes, context_lens, num_queries, window):
            return triton.decode_attention(
                q,
                k,
                v,
                layer=layer,
                block_tables=tables,
                token_lanes=token_lanes,
                context_lens=context_lens,
                num_queries=num_queries,
                window=window,
                scale=head_dim**-0.5,
            )

        def prefill(q, k, v, layer, tables, tiles, window):
            return triton.prefill_attention(
                q,
                k,
                v,
                layer=layer,
                block_tables=tables,
                tiles=tiles,
                window=window,
                scale=head_dim**-0.5,
            )

        dtype = jnp.dtype(query_dtype)
        one_each = shape((LANES, num_heads, head_dim), dtype)
        many = shape((PREFILL_TOKENS, num_heads, head_dim), dtype)
        tiles = PrefillTiles(lanes, lanes, lanes, lanes, scalar)
        return [
            (decode, (one_each, pool, pool, scalar, tables, lanes, lanes, scalar, scalar)),
            (prefill, (many, pool, pool, scalar, tables, tiles, scalar)),
        ]

    return Case(
        name=f"{query_dtype}/{kv_dtype}/d{head_dim}/h{num_heads}x{num_kv_heads}/s{block_size}",
        kv_dtype=kv_dtype,
        head_dim=head_dim,
        kernels=KERNELS,
        programs=programs,
    )


def by_name(cases: Iterable[Case]) -> dict[str, Case]:
    """The cases, each under its name."""
    return {case.name: case for case in cases}


CASES = by_name(
    [
        *(paged_case(*dtypes, head_dim) for dtypes in DTYPES for head_dim in HEAD_DIMS),
        paged_case("bfloat16", "bfloat16", 64, num_heads=9, num_kv_heads=3),
        paged_case("bfloat16", "bfloat16", 128, block_size=32),
        paged_case("bfloat16", "bfloat16", 128, block_size=64),
    ]
)
"""Every configuration of the kernels that is vouched for."""


def faulty_case(
    name: str, body: Callable[..., None], *, size: tuple[int, int] = (16, 16), kernel: str = ""
) -> Case:
    """A kernel that a gate must not let through, on a matrix of that size.

    Args:
        name: Of the fault; the case is `fault/NAME`.
        body: The kernel.
        size: Rows and columns.
        kernel: Name of the kernel that must come out, if it is not the fault's.
    """

    def programs(shape: ShapeOf) -> list[Program]:
        call = pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(size, jnp.float32),
            name=name,
            compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        )
        return [(call, (shape(size, jnp.float32),))]

    return Case(
        name=f"fault/{name}",
        kv_dtype="float32",
        head_dim=size[1],
        kernels=(kernel or name,),
        programs=programs,
    )


def _copy(x_ref: Any, out_ref: Any) -> None:  # noqa: ANN401
    out_ref[...] = x_ref[...] * 2


def _keep(x_ref: Any, out_ref: Any) -> None:  # noqa: ANN401
    x = x_ref[...]
    # All of x is needed again when its sums are known.
    out_ref[...] = x / (jnp.sum(x, axis=0)[None, :] + jnp.sum(x, axis=1)[:, None])


def _multiply(x_ref: Any, out_ref: Any) -> None:  # noqa: ANN401
    out_ref[...] = jax.lax.dot(x_ref[...], x_ref[...])


def _die(x_ref: Any, out_ref: Any) -> None:  # noqa: ANN401
    signal.raise_signal(signal.SIGKILL)


FAULTS = by_name(
    [
        faulty_case("spill", _keep, size=(128, 128)),
        faulty_case("shared_memory", _multiply, size=(256, 256)),
        faulty_case("width", _copy, size=(16, 96)),
        faulty_case("budget", _copy),
        faulty_case("missing", _copy, kernel="another"),
        # As the compiler does at some instructions that a card does not have; the last, therefore.
        faulty_case("abort", _die),
    ]
)
"""What the gate is tried on."""


def read_ptxas(text: str) -> dict[str, Code]:
    """What `ptxas -v` says of each kernel, by name; functions that it calls are counted in."""
    _, *parts = ENTRY.split(text)
    codes: dict[str, Code] = {}
    for name, said in zip(parts[::2], parts[1::2], strict=True):
        registers = re.search(r"Used (\d+) registers", said)
        spills = SPILLS.findall(said)
        if registers is None or not spills:
            raise ValueError(f"ptxas does not say what {name} takes: {said}")
        shared = re.search(r"(\d+) bytes smem", said)
        codes[name] = Code(
            registers=int(registers[1]),
            spill_bytes=sum(int(stored) + int(loaded) for stored, loaded in spills),
            shared_bytes=int(shared[1]) if shared else 0,
        )
    return codes


def read_launches(text: str) -> dict[str, tuple[int, int]]:
    """Threads and dynamic shared memory (bytes) of each kernel's blocks, from a thunk sequence."""
    return {
        name: (int(x) * int(y) * int(z), int(shared_bytes))
        for name, x, y, z, shared_bytes in THUNK.findall(text)
    }


def measure(case: Case, dump: pathlib.Path, target: Target) -> list[Measurement]:
    """What XLA's dump of a program shows of the kernels of a case; those not there are left out.

    The dump is deleted.
    """
    launches: dict[str, tuple[int, int]] = {}
    for path in dump.glob("*thunk_sequence.txt"):
        launches |= read_launches(path.read_text())
    measurements = []
    for path in sorted(dump.glob("*.ptx")):
        ptx = path.read_text()
        # One file may be empty; XLA's own kernels are of no interest.
        if not any(re.search(rf"\.entry {kernel}\b", ptx) for kernel in case.kernels):
            continue
        arch = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]
        for kernel, code in read_ptxas(run_ptxas("-v", f"-arch={arch}", str(path))).items():
            if kernel not in case.kernels or kernel not in launches:
                continue
            threads, launched_bytes = launches[kernel]
            shared_bytes = code.shared_bytes + launched_bytes
            measurements.append(
                Measurement(
                    case=case.name,
                    kernel=kernel,
                    arch=arch,
                    registers=code.registers,
                    spill_bytes=code.spill_bytes,
                    shared_bytes=shared_bytes,
                    threads=threads,
                    blocks_per_core=target.blocks_per_core(
                        threads=threads, registers=code.registers, shared_bytes=shared_bytes
                    ),
                )
            )
    shutil.rmtree(dump)
    return measurements


def run_ptxas(*arguments: str) -> str:
    """What ptxas of the installed package prints; the code that it makes is thrown away."""
    files = importlib.metadata.files("nvidia-cuda-nvcc-cu12") or []
    ptxas = next(file.locate() for file in files if file.name == "ptxas")
    ran = subprocess.run(
        [str(ptxas), *arguments, "-o", "/dev/null"], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise RuntimeError(f"ptxas failed: {ran.stderr}")
    return ran.stdout + ran.stderr


def versions() -> dict[str, str]:
    """Of what has a say in the code.

    Raises:
        click.ClickException: A package is missing, or does not go with JAX.
    """
    try:
        pjrt = importlib.metadata.version("jax-cuda12-pjrt")
        ptxas = re.findall(r"V(\d[\d.]*)", run_ptxas("--version"))[0]
    except (importlib.metadata.PackageNotFoundError, StopIteration) as error:
        raise click.ClickException(
            f"a compiler is missing: {error!r}; pip install '.[gpu-compile]'"
        ) from error
    jaxlib = importlib.metadata.version("jaxlib")
    if pjrt != jaxlib:
        raise click.ClickException(f"jax-cuda12-pjrt {pjrt} does not go with jaxlib {jaxlib}")
    return {"jax": jax.__version__, "ptxas": ptxas}


class Compiler:
    """Compiles for one card."""

    def __init__(self, target: Target) -> None:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target.config(), topology="1x1x1"
        )
        self._sharding = SingleDeviceSharding(topology.devices[0])
        # Pallas takes from it which card it is; JAX 0.10 does not ask.
        device = AbstractDevice(
            device_kind=topology.devices[0].device_kind, num_cores=None, platform="gpu"
        )
        self._mesh = AbstractMesh((), (), abstract_device=device)

    def shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:  # noqa: ANN401
        """An argument on the card."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def dump(self, program: Program, folder: pathlib.Path) -> None:
        """Compile, and leave in the folder what XLA has to say."""
        function, arguments = program
        # Another value for the emitters would dump every pass, and take ten times as long.
        options: dict[str, str | bool] = {"xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx"}
        with use_abstract_mesh(self._mesh):
            jax.jit(function).trace(*arguments).lower().compile(compiler_options=options)


def compile_case(compiler: Compiler, case: Case, dumps: pathlib.Path) -> Iterator[pathlib.Path]:
    """Compiles what belongs to a case; yields the folder of each dump."""
    for program in case.programs(compiler.shape):
        folder = pathlib.Path(tempfile.mkdtemp(dir=dumps))
        compiler.dump(program, folder)
        yield folder


def report(item: dict[str, object]) -> None:
    """Print at once: the next case may end the process."""
    print(json.dumps(item), flush=True)


@contextlib.contextmanager
def reported_failure(case: Case) -> Iterator[None]:
    """Whatever the compiler objects to becomes a line of the report."""
    try:
        yield
    except Exception as error:  # it may raise anything
        text = f"{type(error).__name__}: {error}"
        report({"case": case.name, "error": " ".join(text.split())[:MOST_ERROR_CHARACTERS]})


@click.command()
@click.argument("target", type=click.Choice(list(gpu_targets.TARGETS)))
@click.argument("cases", nargs=-1, type=click.Choice([*CASES, *FAULTS]), metavar="[CASE]...")
@click.option(
    "--scratch",
    type=click.Path(exists=True, file_okay=False, path_type=pathlib.Path),
    help="Where dumps go for a while; they stay there if the compiler ends the process.",
)
def main(target: str, cases: tuple[str, ...], scratch: pathlib.Path | None) -> None:
    """Compile the kernels for a card and print what each takes, as JSON; all cases by default.

    Example: python scripts/compile_target.py h100
    """
    # The plugin would look for a driver; a cached executable would have no PTX.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    report({"target": target, **versions()})
    card = gpu_targets.TARGETS[target]
    compiler = Compiler(card)
    chosen = [{**CASES, **FAULTS}[name] for name in cases or CASES]
    measured: list[tuple[Case, Future[list[Measurement]]]] = []

    def print_measured(most_left: int) -> None:
        while len(measured) > most_left:
            case, future = measured.pop(0)
            with reported_failure(case):
                for measurement in future.result():
                    report(dataclasses.asdict(measurement))

    # While ptxas measures one case, the next is compiled.
    with tempfile.TemporaryDirectory(dir=scratch) as dumps, ThreadPoolExecutor(1) as executor:
        for case in chosen:
            report({"starts": case.name})
            with reported_failure(case):
                for folder in compile_case(compiler, case, pathlib.Path(dumps)):
                    measured.append((case, executor.submit(measure, case, folder, card)))
            print_measured(most_left=4)
        print_measured(most_left=0)


if __name__ == "__main__":
    main()
