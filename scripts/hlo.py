"""Reads the text of an optimised XLA program (HLO): what is computed of what, and how large it is.

What instructions mean for a card is not known here; see `hlo_traffic.py`.
"""

import dataclasses
import math
import re

DTYPE_BITS = {"pred": 8, "token": 0, "opaque": 0}
"""Of dtypes whose name does not say it."""
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.-]+) = (.*)")
COMPUTATION = re.compile(r"(ENTRY )?%([\w.-]+) \(.*\{$")
OPERAND = re.compile(r"%([\w.-]+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """A line of HLO text.

    Attributes:
        name: Without its sign.
        opcode: What it does.
        shape: Of its result, as text; a tuple's in parentheses.
        operands: Names, in order.
        rest: What follows the operands.
        is_root: It is the result of its computation.
        index: Of a parameter, which one it is.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool
    index: int | None

    def called(self, *attributes: str) -> list[str]:
        """Names of the computations that it has in these attributes."""
        found: list[str] = []
        for attribute in attributes:
            for one, several in re.findall(rf"\b{attribute}=(?:%([\w.-]+)|\{{(.*?)\}})", self.rest):
                found += [one] if one else OPERAND.findall(several)
        return found


Computation = dict[str, Instruction]
"""Instructions by name, in the order of the text."""


def _closing(text: str) -> int:
    """Where the parenthesis closes that opens at the start of the text."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    raise ValueError(f"nothing closes the parenthesis: {text[:100]}")


def read_instruction(line: str) -> Instruction | None:
    """The instruction of a line; None if there is none.

    Raises:
        ValueError: It is not understood.
    """
    match = INSTRUCTION.match(line)
    if match is None:
        return None
    text = match[3]
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    shape, text = text[:end], text[end:].lstrip()
    opcode, _, _ = text.partition("(")
    text = text[len(opcode) :]
    end = _closing(text)
    return Instruction(
        name=match[2],
        opcode=opcode,
        shape=shape,
        operands=tuple(OPERAND.findall(text[:end])),
        rest=text[end + 1 :],
        is_root=match[1] is not None,
        index=int(text[1:end]) if opcode == "parameter" else None,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """An optimised program.

    Attributes:
        computations: By name.
        entry: Name of the one that is run.
    """

    computations: dict[str, Computation]
    entry: str

    @classmethod
    def read(cls, text: str) -> "Module":
        """From the text of `Compiled.as_text()`.

        Raises:
            ValueError: It has no entry computation.
        """
        computations: dict[str, Computation] = {}
        entry = None
        current: Computation = {}
        for line in text.splitlines():
            if match := COMPUTATION.match(line):
                current = computations[match[2]] = {}
                entry = match[2] if match[1] else entry
            elif instruction := read_instruction(line):
                current[instruction.name] = instruction
        if entry is None:
            raise ValueError("the program has no entry computation")
        return cls(computations=computations, entry=entry)

    def executed(self) -> list[str]:
        """Names of the computations whose instructions are run one by one."""
        names = [self.entry]
        for name in names:
            for item in self.computations[name].values():
                if item.opcode == "while":
                    names += item.called("body", "condition")
                elif item.opcode == "call":
                    names += item.called("to_apply")
                elif item.opcode == "conditional":
                    names += item.called(
                        "branch_computations", "true_computation", "false_computation"
                    )
        return names

    def has_loop(self) -> bool:
        """Part of it runs an unknown number of times."""
        return any(
            item.opcode == "while"
            for name in self.executed()
            for item in self.computations[name].values()
        )

    def body(self, item: Instruction) -> Computation | None:
        """The computation of a fusion; None of anything else."""
        if item.opcode not in ("fusion", "fusion-start"):
            return None
        (name,) = item.called("calls")
        return self.computations[name]


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and dimensions of the arrays of a shape."""
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in ARRAY.findall(shape)
    ]


def num_bytes(shape: str) -> int:
    """Bytes of the arrays of a shape."""
    bits = 0
    for dtype, sizes in arrays(shape):
        width = DTYPE_BITS.get(dtype)
        if width is None:
            # f8e4m3fn has 8 bits, bf16 has 16.
            found = re.match(r"[a-z]+(\d+)", dtype)
            if found is None:
                raise ValueError(f"how large is {dtype}?")
            width = int(found[1])
        bits += math.prod(sizes) * width
    return -(-bits // 8)


def root_of(body: Computation) -> list[Instruction]:
    """What makes the results of a computation, behind changes of shape."""
    (root,) = (item for item in body.values() if item.is_root)
    roots = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for index, item in enumerate(roots):
        while item.opcode in ("bitcast", "reshape"):
            item = body[item.operands[0]]
        roots[index] = item
    return roots


def source_of(computation: Computation, name: str) -> Instruction:
    """What an operand is, behind changes of shape."""
    item = computation[name]
    while item.opcode == "bitcast":
        item = computation[item.operands[0]]
    return item
