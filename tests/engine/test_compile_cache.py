"""Programs kept between runs, in processes of their own: JAX is told of the folder only once."""

import pathlib
import subprocess
import sys

import jax
import pytest

from jaxpaged.engine import compile_cache

ROOT = pathlib.Path(__file__).parents[2]
# A program that compiles in far less than the second below which JAX would not keep it.
COMPILE = (
    "import jax\n"
    "from jaxpaged.engine import compile_cache\n"
    "compile_cache.enable()\n"
    "print(jax.jit(lambda x: x + 1)(1))"
)


def compiled_in(home: pathlib.Path, **variables: str) -> set[pathlib.Path]:
    """Compiles a small program; what lies in the home folder then."""
    environment = {"HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.strip(), done.stderr) == ("2", "")
    return {path for path in home.rglob("*") if path.is_file() and "compiled" in path.parts}


def test_a_small_program_is_kept_and_found_again(tmp_path) -> None:
    kept = {path for path in compiled_in(tmp_path) if path.name.endswith("-cache")}
    assert kept
    stamps = {path: path.stat().st_mtime_ns for path in kept}
    again = {path for path in compiled_in(tmp_path) if path.name.endswith("-cache")}
    assert {path: path.stat().st_mtime_ns for path in again} == stamps


@pytest.mark.parametrize("home", ["/dev/null", "/proc"])
def test_without_a_folder_to_write_to_it_compiles_all_the_same(tmp_path, home) -> None:
    assert not compiled_in(tmp_path, XDG_CACHE_HOME=f"{home}/nowhere")


def test_a_folder_that_jax_was_given_stays(strict_jax) -> None:
    before = jax.config.jax_compilation_cache_dir
    assert before not in (None, str(compile_cache.folder()))
    compile_cache.enable()
    assert jax.config.jax_compilation_cache_dir == before
