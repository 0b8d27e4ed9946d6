"""Compiles for one card ahead of time, on a machine that needs no GPU.

XLA compiles from a description of the card. One process compiles for one card only: a compiler
that has made code for one has been seen to hand it out for another. Needs the packages of
`pip install '.[gpu-compile]'`; nothing is run.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import re
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import click
import jax
from gpu_targets import Target
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

ShapeOf = Callable[..., Any]
"""Makes what stands for an array on the card, from its shape and dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A function to compile.

    Attributes:
        function: It is called with what follows.
        arguments: By place.
        named: By name.
        donated: Places of arguments whose memory it may take for its results.
        options: Of the compiler, beside those that every program gets.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    donated: tuple[int, ...] = ()
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Compiler:
    """Compiles for one card."""

    def __init__(self, target: Target) -> None:
        # The plugin would look for a driver; a cached executable would leave no dump.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_compilation_cache", False)
        # Mosaic GPU takes the first ptxas on the path, and what its PTX looks like from that.
        places = [str(ptxas_path().parent), *os.get_exec_path()]
        os.environ["PATH"] = os.pathsep.join(places)  # noqa: TID251
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

    def compile(self, program: Program, dump: pathlib.Path) -> jax.stages.Compiled:
        """Compile, and leave in the folder what XLA and Mosaic GPU have to say."""
        # Another value for the emitters would dump every pass, and take ten times as long.
        dumping: dict[str, str | bool] = {"xla_dump_to": str(dump), "xla_dump_emitter_re": "ptx"}
        # Mosaic GPU compiles by itself. It looks here each time, and nowhere else. A program that
        # it has compiled before it does not compile again, and leaves no PTX.
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump)  # noqa: TID251
        jitted = jax.jit(program.function, donate_argnums=program.donated)
        with use_abstract_mesh(self._mesh):
            lowered = jitted.trace(*program.arguments, **program.named).lower()
            return lowered.compile(compiler_options=dumping | dict(program.options))


def ptxas_path() -> pathlib.Path:
    """Where the installed package has ptxas; its version is pinned, that of a toolkit is not."""
    files = importlib.metadata.files("nvidia-cuda-nvcc-cu12") or []
    return pathlib.Path(next(str(file.locate()) for file in files if file.name == "ptxas"))


def run_ptxas(*arguments: str) -> str:
    """What ptxas of the installed package prints; the code that it makes is thrown away."""
    ran = subprocess.run(
        [str(ptxas_path()), *arguments, "-o", "/dev/null"],
        capture_output=True,
        text=True,
        check=False,
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
