"""What a benchmark ran on: every figure is quoted with this."""

import importlib.metadata
import os
import pathlib
import platform

import jaxpaged

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "pyarrow")


def describe() -> dict[str, object]:
    """Versions, processor, cores and load average (of the last minute, before the run).

    Call it before the measurement: the load average is to show what else was running.
    """
    return {
        "python": platform.python_version(),
        "jaxpaged": jaxpaged.__version__,
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
