"""Numbers for people: short enough for an axis, or exact enough for a table."""

import math

Number = int | float

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def short(value: Number) -> str:
    """At most four digits and a unit: 950, 1.5k, 20M."""
    size = abs(value)
    for factor, unit in _UNITS:
        # From where rounding would give a thousand of the unit below.
        if size >= 0.9995 * factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def memory(num_bytes: int) -> str:
    """Bytes in the largest unit of which there is one."""
    power = min(len(_BYTES) - 1, int(math.log(max(1, num_bytes), 1024)))
    return f"{num_bytes / 1024**power:,.{1 if power else 0}f} {_BYTES[power]}"


def duration(seconds: Number) -> str:
    """A time span: 0.35 s, 12.4 s, 5 min 3 s, 2 h 10 min."""
    # From there on it would be rounded to 60.0.
    if seconds < 59.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"
