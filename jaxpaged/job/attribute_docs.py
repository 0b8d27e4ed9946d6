"""What a class's docstring says of each attribute, in its section "Attributes:".

Attributes:
    name: The first line
        and what follows it.
"""

import inspect
import re

_ENTRY = re.compile(r" {4}(\w+): (.*)")
_CONTINUED = re.compile(r" {8,}(.*)")


def summary(owner: type) -> str:
    """The docstring's first paragraph, on one line; "" without a docstring."""
    return " ".join((inspect.getdoc(owner) or "").partition("\n\n")[0].split())


def attributes(owner: type) -> dict[str, str]:
    """The descriptions by name, each on one line, in the docstring's order."""
    section = (inspect.getdoc(owner) or "").partition("\nAttributes:\n")[2]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if entry := _ENTRY.fullmatch(line):
            name, found[entry[1]] = entry.groups()
        elif (more := _CONTINUED.fullmatch(line)) and name:
            found[name] += f" {more[1]}"
        else:
            break
    return found
