"""Models of the Hugging Face hub: what is downloaded, what is not, and what is said about it."""

import contextlib
import json
import logging
import pathlib
import socket

import fake_hub
import huggingface_hub
import pytest
import tiny

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.model import hub, source
from jaxpaged.model.checkpoint import open_checkpoint

NAME = "hf://org/tiny"

BESIDE = {
    "pytorch_model.bin": b"\x80\x04pickle",
    "model.pt": b"\x80\x04pickle",
    "modeling_evil.py": b"raise SystemExit",
    "consolidated.safetensors": b"of another layout",
    "onnx/model.safetensors": b"of another format",
    "onnx/config.json": b"{}",
    "README.md": b"# words",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    """A tiny Llama in two shards, as files of a repository."""
    folder = tiny.write_tiny_llama(tmp_path_factory.mktemp("hub") / "tiny", num_shards=2)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def served():
    with fake_hub.FakeHub() as server:
        yield server


@pytest.fixture
def get(served, tmp_path):
    """Fetches from the fake hub into a cache of one's own."""

    def fetch(name: str, **options) -> hub.Snapshot:
        where = {"endpoint": served.endpoint, "cache": tmp_path / "cache"}
        return hub.fetch(name, **where | options)

    return fetch


@pytest.fixture
def get_offline(tmp_path):
    """The same where nobody answers."""
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
        yield lambda name: hub.fetch(name, endpoint=endpoint, cache=tmp_path / "cache")


def test_commit_gives_the_model_and_only_its_files(served, get, files):
    commit = served.commit("org/tiny", files | BESIDE)
    found = get(f"{NAME}@{commit}")
    assert found.name == f"{NAME}@{commit}"
    assert found.path.name == commit
    assert {path.name for path in found.path.rglob("*")} == files.keys()
    assert set(served.served("resolve")) == files.keys()
    checkpoint = open_checkpoint(found.path)
    assert checkpoint.shapes()
    assert checkpoint.tokenizer().vocab_size == 272


def test_named_templates_come_along(served, get, get_offline, files):
    name = "additional_chat_templates/rag.jinja"
    more = {name: b"{{ documents }}", "additional_chat_templates/evil.py": b"raise SystemExit"}
    commit = served.commit("org/tiny", files | more)
    found = get(f"{NAME}@{commit}")
    assert {path.name for path in found.path.rglob("*.*")} == {*files, "rag.jinja"}
    templates = open_checkpoint(found.path).chat_templates()
    assert templates.sources == {"rag": "{{ documents }}"}
    assert get_offline(f"{NAME}@{commit}") == found
    (found.path / name).unlink()
    assert (get(f"{NAME}@{commit}").path / name).read_bytes() == more[name]


def test_cached_commit_asks_nobody(served, get, files):
    commit = served.commit("org/tiny", files)
    found = get(f"{NAME}@{commit}")
    served.requests.clear()
    assert get(f"{NAME}@{commit}") == found
    assert served.requests == []


def test_branch_is_named_by_its_commit_and_warned_of(served, get, files, caplog):
    first = served.commit("org/tiny", files)
    with caplog.at_level(logging.WARNING):
        assert get(NAME).name == f"{NAME}@{first}"
    assert f"names no commit and may be another model tomorrow; it is {NAME}@{first}" in caplog.text
    second = served.commit("org/tiny", files | {"generation_config.json": b"{}"})
    found = get(f"{NAME}@main")
    assert found.name == f"{NAME}@{second}"
    assert (found.path / "generation_config.json").read_bytes() == b"{}"


def test_commit_is_not_warned_of(served, get, files, caplog):
    commit = served.commit("org/tiny", files)
    with caplog.at_level(logging.WARNING):
        get(f"{NAME}@{commit}")
    assert "names no commit" not in caplog.text


def test_tag_or_branch_by_name(served, get, files):
    commit = served.commit("org/tiny", files, branch="v1.0")
    assert get(f"{NAME}@v1.0").name == f"{NAME}@{commit}"
    with pytest.raises(ConfigError, match="org/tiny has no revision v2; see its page"):
        get(f"{NAME}@v2")


def test_single_gguf_of_a_repository(served, get, files):
    contents = {"tiny.Q8_0.gguf": b"GGUF" * 500, "q4/tiny.Q4_0.gguf": b"GGUF" * 400}
    commit = served.commit("org/tiny", files | contents)
    found = get(f"{NAME}@{commit}/tiny.Q8_0.gguf")
    assert found.path.read_bytes() == contents["tiny.Q8_0.gguf"]
    assert found.name == f"{NAME}@{commit}/tiny.Q8_0.gguf"
    assert served.served("resolve") == ["tiny.Q8_0.gguf"] * len(served.served("resolve"))
    assert get(f"{NAME}/q4/tiny.Q4_0.gguf").path.read_bytes() == contents["q4/tiny.Q4_0.gguf"]
    with pytest.raises(ConfigError, match=r"org/tiny has no tiny\.Q2\.gguf at"):
        get(f"{NAME}@{commit}/tiny.Q2.gguf")


def test_single_safetensors_without_index(served, get, tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "single")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    served.commit("org/tiny", files | BESIDE)
    assert {path.name for path in get(NAME).path.iterdir()} == files.keys()


def test_repository_of_pickles_gives_none_of_them(served, get, files):
    kept = {name: data for name, data in files.items() if "safetensors" not in name}
    served.commit("org/tiny", kept | BESIDE)
    with pytest.raises(
        ConfigError, match=r"org/tiny has no model\.safetensors at main, and pickles are not read"
    ):
        get(NAME)
    assert not any(name.endswith((".bin", ".pt", ".py")) for name in served.served("resolve"))


def test_wrong_bytes_are_found_and_taken_again(served, get, files):
    commit = served.commit("org/tiny", files)
    served.wrong = {"model-00002-of-00002.safetensors"}
    with pytest.raises(CheckpointError, match="downloaded bytes are not those that the hub names"):
        get(f"{NAME}@{commit}")
    served.wrong = {"config.json"}
    with pytest.raises(CheckpointError, match="downloaded bytes"):
        get(f"hf://org/tiny@{served.commit('org/tiny', files | {'config.json': b'{} '})}")
    served.wrong = set()
    assert open_checkpoint(get(f"{NAME}@{commit}").path).shapes()


def test_progress_is_told_in_tenths(served, get, files):
    commit = served.commit("org/tiny", files)
    notes: list[str] = []
    get(f"{NAME}@{commit}", note=notes.append)
    assert notes[0].startswith("downloading 5 files, ")
    assert NAME in notes[0]
    assert any(note.startswith("downloading 2 files") for note in notes)
    done = [note for note in notes if note.startswith("downloaded")]
    assert done[-1].split()[1] == done[-1].split()[4]
    again: list[str] = []
    get(f"{NAME}@main", note=again.append)
    assert again == []


def test_cached_model_is_used_where_nobody_answers(served, get, get_offline, files, caplog):
    commit = served.commit("org/tiny", files)
    found = get(NAME)
    assert get_offline(f"{NAME}@{commit}") == found
    with caplog.at_level(logging.WARNING):
        assert get_offline(NAME) == found
    assert "is taken from the cache, for the hub cannot be reached" in caplog.text


@pytest.mark.parametrize("name", [NAME, f"{NAME}@{'0' * 40}", f"{NAME}@{'0' * 40}/x.gguf"])
def test_model_that_is_not_cached_says_what_to_do(get_offline, name):
    with pytest.raises(ConfigError, match=r"cannot be downloaded: .*connect to the network"):
        get_offline(name)


@pytest.mark.parametrize(
    "name",
    ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"],
)
def test_partial_cache_is_not_taken_for_the_model(served, get, get_offline, files, name):
    commit = served.commit("org/tiny", files)
    (get(f"{NAME}@{commit}").path / name).unlink()
    with pytest.raises(ConfigError, match="not in the cache, or not all of it"):
        get_offline(f"{NAME}@{commit}")
    assert (get(f"{NAME}@{commit}").path / name).read_bytes() == files[name]


def test_cache_without_its_listing_is_looked_through(served, get, get_offline, files, tmp_path):
    commit = served.commit("org/tiny", files)
    found = get(f"{NAME}@{commit}")
    for listing in (tmp_path / "cache").rglob("trees/*.json"):
        listing.unlink()
    assert get_offline(f"{NAME}@{commit}") == found
    (found.path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="not all of it"):
        get_offline(f"{NAME}@{commit}")


def test_what_others_cached_one_by_one_is_completed(served, get, get_offline, files, tmp_path):
    """Without generation_config.json completions would end elsewhere, and nobody would know."""
    commit = served.commit("org/tiny", files)
    for name in ("config.json", "tokenizer.json", *(n for n in files if "safetensors" in n)):
        huggingface_hub.hf_hub_download(
            "org/tiny",
            name,
            revision=commit,
            endpoint=served.endpoint,
            cache_dir=tmp_path / "cache",
        )
    folder = get_offline(f"{NAME}@{commit}").path
    assert "generation_config.json" not in {path.name for path in folder.iterdir()}
    get(f"{NAME}@{commit}")
    assert {path.name for path in folder.iterdir()} == files.keys()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a.gguf"], r"no config\.json at main; .* is named so: hf://org/tiny@main/a\.gguf$"),
        (["adapter_config.json"], r"no config\.json at main: it is an adapter"),
        (["config.json", "pytorch_model.bin"], r"no model\.safetensors at main, and pickles"),
        (["config.json", "consolidated.safetensors"], r"no model\.safetensors at main$"),
    ],
)
def test_repository_without_a_model_says_what_it_has(served, get, names, said):
    served.commit("org/tiny", dict.fromkeys(names, b"{}"))
    with pytest.raises(ConfigError, match=said):
        get(NAME)


@pytest.mark.parametrize("name", ["refs/pr/1", "refs/convert/parquet", "v1+cu", "feature%2Fx"])
def test_revisions_of_every_kind(served, get, files, name):
    revision = name.replace("%2F", "/")
    commit = served.commit("org/tiny", files, branch=revision)
    assert get(f"{NAME}@{name}").name == f"{NAME}@{commit}"


def test_unknown_and_private_repositories(served, get):
    with pytest.raises(
        ConfigError, match="there is no model org/none on the hub, or it is private"
    ):
        get("hf://org/none")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "access to org/tiny is refused; log in: hf auth login"),
        (403, "access to org/tiny is refused"),
        (429, "takes no more requests for now"),
        (500, "cannot be downloaded"),
        (503, "cannot be downloaded"),
    ],
)
def test_hub_that_refuses(served, get, files, status, said):
    served.commit("org/tiny", files)
    served.status = status
    with pytest.raises(ConfigError, match=said):
        get(NAME)


def test_single_file_beside_shards_is_the_model(served, get, get_offline, files):
    commit = served.commit("org/tiny", files | {"model.safetensors": b"whole"})
    found = get(f"{NAME}@{commit}")
    assert [path.name for path in found.path.glob("*.safetensors")] == ["model.safetensors"]
    assert get_offline(f"{NAME}@{commit}") == found


def test_token_is_sent_and_never_shown(served, get, files, monkeypatch, caplog, capfd, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    served.commit("org/tiny", files)
    notes: list[str] = []
    with caplog.at_level(logging.DEBUG, logger="jaxpaged"):
        get(NAME, note=notes.append)
    assert served.headers["authorization"] == "Bearer hf_secretsecretsecret"
    served.status = 401
    with pytest.raises(ConfigError) as error:
        get("hf://org/other")
    shown = [*notes, caplog.text, *capfd.readouterr(), str(error.value)]
    assert not any("hf_secret" in text for text in shown)
    stored = (path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert not any(b"hf_secret" in content for content in stored)


@pytest.mark.parametrize(
    "name",
    [
        "hf://",
        "hf://tiny",
        "hf://org/",
        "hf://org/tiny@",
        "hf://org/tiny/",
        "hf://org/tiny/folder",
        "hf://org/tiny@main/model.bin",
        "hf://org/tiny@feature/x",
        "hf://org/tiny@a%2F%2e%2e",
        "hf://../tiny",
        "hf://org/..",
        "hf://org/tiny@main/../x.gguf",
        "hf://org/tiny@../x.gguf",
        "hf:///etc/passwd",
        "hf://org/ti ny",
    ],
)
def test_malformed_name(name):
    with pytest.raises(ConfigError, match="malformed; expected hf://organisation/name@revision"):
        source.resolve(name)


def test_index_that_names_other_folders_downloads_nothing_there(served, get, files):
    index = {"weight_map": {"a": "../x.safetensors", "b": "onnx/model.safetensors"}}
    listed = files | BESIDE | {"model.safetensors.index.json": json.dumps(index).encode()}
    served.commit("org/tiny", listed)
    with pytest.raises(ConfigError, match="has no"):
        get(NAME)
    assert "onnx/model.safetensors" not in served.served("resolve")


@pytest.mark.parametrize(
    "index",
    [
        b"[" * 100_000,
        json.dumps({"weight_map": {"a": "evil.py", "b": "pytorch_model.bin"}}).encode(),
    ],
)
def test_index_of_pickles_or_of_nothing_downloads_no_weights(served, get, files, index):
    listed = files | {
        "evil.py": b"",
        "pytorch_model.bin": b"",
        "model.safetensors.index.json": index,
    }
    served.commit("org/tiny", listed)
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        get(NAME)
    assert not {"evil.py", "pytorch_model.bin"} & set(served.served("resolve"))


def test_other_scheme_names_this_one():
    with pytest.raises(ConfigError, match="or write hf://organisation/name@revision"):
        source.resolve("s3://bucket/model")


def test_folder_keeps_its_name(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "tiny")
    assert source.resolve(str(folder)) == source.Source(path=folder, name=str(folder))
    assert source.resolve("tiny", base=tmp_path).path == pathlib.Path(folder)
