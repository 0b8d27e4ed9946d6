"""What the code of kernels takes on a card, from what the compilers leave in a folder.

The PTX is measured with the same ptxas that XLA and Mosaic GPU use. How many threads a block has
and how much shared memory it asks for at launch, XLA says of its own kernels and of Triton's in its
thunk sequence, Mosaic GPU in its program.
"""

import dataclasses
import pathlib
import re
import shutil

import gpu_compiler
from gpu_targets import Target
from kernel_cases import Case

THUNK = re.compile(
    r"(\w+) grid: \[[\d, ]+\] threads: \[(\d+), (\d+), (\d+)\]\s+shared_memory: (\d+) bytes"
)
ENTRY = re.compile(r"Compiling entry function '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")

MOSAIC_ENTRY = "_mosaic_gpu_kernel"
"""Mosaic GPU puts this behind the name of a kernel."""
MOSAIC_MODULE = re.compile(r"^module @(\w+)", re.MULTILINE)
MOSAIC_CONSTANT = re.compile(r"(%\w+) = arith\.constant (\d+) :")
MOSAIC_LAUNCH = re.compile(
    r"gpu\.launch .*threads\(.*?\) in \(%\w+ = (%\w+), %\w+ = (%\w+), %\w+ = (%\w+)\) "
    r"dynamic_shared_memory_size (%\w+)"
)


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
        codes[name.removesuffix(MOSAIC_ENTRY)] = Code(
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


def read_mosaic_launch(text: str) -> dict[str, tuple[int, int]]:
    """The same of the one kernel of a Mosaic GPU program.

    Raises:
        ValueError: It is not understood.
    """
    module, launch = MOSAIC_MODULE.search(text), MOSAIC_LAUNCH.search(text)
    if module is None or launch is None:
        raise ValueError(f"the program launches nothing: {text[:100]}")
    numbers = {name: int(number) for name, number in MOSAIC_CONSTANT.findall(text)}
    x, y, z, shared_bytes = (numbers[name] for name in launch.groups())
    return {module[1]: (x * y * z, shared_bytes)}


def measure(case: Case, dump: pathlib.Path, target: Target) -> list[Measurement]:
    """What the dump of a program shows of the kernels of a case; those not there are left out.

    The dump is deleted.
    """
    launches: dict[str, tuple[int, int]] = {}
    for path in dump.glob("*thunk_sequence.txt"):
        launches |= read_launches(path.read_text())
    for path in dump.glob("*.before_layout_inference.txt"):
        launches |= read_mosaic_launch(path.read_text())
    measurements = []
    for path in sorted(dump.glob("*.ptx")):
        ptx = path.read_text()
        # One file may be empty; XLA's own kernels are of no interest.
        if not any(re.search(rf"\.entry {name}({MOSAIC_ENTRY})?\b", ptx) for name in case.kernels):
            continue
        arch = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]
        said = gpu_compiler.run_ptxas("-v", f"-arch={arch}", str(path))
        for kernel, code in read_ptxas(said).items():
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
