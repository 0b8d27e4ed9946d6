"""Tiny models for the tests of the model files."""

import pathlib

import pytest
import tiny


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A tiny Llama of one's own, to be changed."""
    return tiny.write_tiny_llama(tmp_path / "tiny")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny Llama that no test changes."""
    return tiny.write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    """The folder of fixtures that others computed."""
    return pathlib.Path(__file__).parent.parent / "golden"
