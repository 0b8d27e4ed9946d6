"""How values of untrusted files are written into messages: cut short, whatever their size."""

import reprlib

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200
_short.maxlist = _short.maxtuple = _short.maxdict = 12
_short.maxlevel = 3


def shown(value: object) -> str:
    """The value as Python writes it, long texts and lists cut in their middle or end."""
    return _short.repr(value)
