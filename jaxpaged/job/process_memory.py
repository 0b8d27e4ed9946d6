"""How much memory this process has taken, as the operating system counts it."""

import resource
import sys


def peak_bytes() -> int:
    """Most bytes that were resident at once since the process began."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB.
    return peak if sys.platform == "darwin" else 1024 * peak
