"""What `jaxpaged doctor` finds on machines with and without a GPU."""

import pathlib

import pytest
from click.testing import CliRunner

from jaxpaged import doctor
from jaxpaged.cli import main
from jaxpaged.job import versions

DRIVER = "proc/driver/nvidia/version"


def advice(root: pathlib.Path) -> list[str]:
    return [value for name, value in doctor.findings(root) if name == "advice"]


@pytest.fixture
def plugin(monkeypatch):
    """Installs the CUDA plugin, as far as anybody can see."""

    def install() -> None:
        known = versions.version_of
        monkeypatch.setattr(
            versions, "version_of", lambda name: "0.10.2" if "cuda12" in name else known(name)
        )

    return install


@pytest.fixture
def driver(tmp_path) -> pathlib.Path:
    (tmp_path / DRIVER).parent.mkdir(parents=True)
    (tmp_path / DRIVER).write_text("NVRM version: 570\n")
    return tmp_path


def test_the_command_names_device_attention_and_versions() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    found = dict(line.split(": ", 1) for line in result.output.splitlines())
    assert found["backend"] == "cpu"
    assert found["attention"] == "llvm (compiled for this CPU, linear maps too)"
    assert found["attention if triton is asked for"] == "triton_interpreted"
    assert "the kernel is for 9.0 (H100, H200)" in found["attention if mosaic is asked for"]
    assert found["weights and KV cache"] == "float32 (the default on a cpu)"
    assert found["deterministic"] == "yes (the default on a cpu)"
    assert f"jax {versions.installed()['jax']}" in found["versions"]
    assert found["memory available"].endswith(" GiB")


def test_a_gpu_that_jax_cannot_use_is_told_with_the_remedy(driver) -> None:
    (text,) = advice(driver)
    assert "pip install 'jaxpaged[cuda12]'" in text
    assert "/proc/driver/nvidia/version" in text


def test_a_gpu_that_jax_does_not_use_although_it_could(driver, plugin) -> None:
    plugin()
    (text,) = advice(driver)
    assert "JAX_PLATFORMS" in text


def test_cuda_without_a_driver_is_told(tmp_path, plugin) -> None:
    assert advice(tmp_path) == []
    plugin()
    (text,) = advice(tmp_path)
    assert "no NVIDIA driver" in text
