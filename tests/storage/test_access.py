import subprocess
import sys
from typing import Any

import pydantic
import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.storage import access
from jaxpaged.storage.disk import Disk
from jaxpaged.storage.local_store import LocalStore
from jaxpaged.storage.options import StorageOptions, look_up

SECRET = "hunter2/and+more"


def run(script: str) -> str:
    """What a new process says, in which nothing was imported yet."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("place", "scheme"),
    [
        ("/a/b", None),
        ("a:b/c", None),
        ("s3://b/k", "s3"),
        ("gs://b", "gs"),
        ("http://h/x", "http"),
    ],
)
def test_a_url_is_told_from_a_path(place, scheme):
    assert access.split(place) == scheme


@pytest.mark.parametrize(
    "url", ["s3://bucket", "gs://my-bucket.x_y/folder", "s3://b/a b/ü=1&2/*.parquet", "s3://B/[x]"]
)
def test_a_url_loses_its_last_slashes_and_nothing_else(url):
    assert access.check_url(url) == url
    assert access.check_url(f"{url}//") == url


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"s3://key:{SECRET}@bucket/x", "without user and password; credentials belong to the se"),
        (f"s3://hunter2@bucket/{SECRET}", "without user and password"),
        (f"gs://key:{SECRET}", "without user and password"),
        (f"s3://bucket/x?token={SECRET}", r"without \? and #, such as s3://bucket/folder"),
        (f"gs://bucket/x#{SECRET}", r"without \? and #, such as gs://bucket/folder"),
        (f"http://{SECRET}@host/x", "expected a local path, or a URL that begins with s3:// or g"),
        (f"S3://bucket/{SECRET}", "expected a local path, or a URL"),
        (f"s3:///{SECRET}", "expected a URL such as s3://bucket/folder"),
        ("s3://", "expected a URL such as s3://bucket/folder"),
        (f"s3://bucket//{SECRET}", "expected a URL such as s3://bucket/folder"),
        (f"s3://bucket/../{SECRET}", "expected a URL such as s3://bucket/folder"),
        (f"s3://bucket/./{SECRET}", "expected a URL such as s3://bucket/folder"),
        (f"s3://bucket/\n{SECRET}", "expected a URL such as s3://bucket/folder"),
        (f"s3://bucket*/{SECRET}", "expected a URL such as s3://bucket/folder"),
        ("s3://bucket/x\0", "expected a URL such as s3://bucket/folder"),
    ],
)
def test_a_wrong_url_is_refused_and_never_repeated(url, message):
    with pytest.raises(ValueError, match=message) as refused:
        access.check_url(url)
    with pytest.raises(ConfigError, match=message) as opened:
        access.filesystem(url, StorageOptions())

    for caught in (refused, opened):
        assert SECRET not in str(caught.value)
        assert "hunter2" not in str(caught.value)


def test_a_path_is_a_local_store(tmp_path):
    disk = Disk()
    store = access.open_store(
        str(tmp_path / "out"), StorageOptions(), private="_x", durability="process", disk=disk
    )

    assert isinstance(store, LocalStore)
    assert store.url == str(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_options_reach_s3_and_nothing_is_remembered(monkeypatch):
    monkeypatch.setenv("A_KEY", "key")
    monkeypatch.setenv("A_SECRET", SECRET)
    monkeypatch.setenv("A_TOKEN", "token")
    options = StorageOptions.model_validate(
        {
            "s3": {
                "endpoint_url": "https://storage.example.com:9000",
                "region": "eu-west-1",
                "profile": "work",
                "key": "${ENV:A_KEY}",
                "secret": "${ENV:A_SECRET}",
                "token": "${ENV:A_TOKEN}",
            }
        }
    )

    filesystem: Any
    filesystem, path = access.filesystem("s3://bucket/a/b/", options)
    again, _ = access.filesystem("s3://bucket/a/b/", options)

    assert path == "bucket/a/b"
    assert filesystem.endpoint_url == "https://storage.example.com:9000"
    assert (filesystem.key, filesystem.secret, filesystem.token) == ("key", SECRET, "token")
    assert filesystem.client_kwargs == {"region_name": "eu-west-1"}
    assert filesystem.kwargs == {"profile": "work"}
    assert not filesystem.anon
    assert not filesystem.dircache.use_listings_cache
    assert again is not filesystem
    assert not any(known is filesystem for known in type(filesystem)._cache.values())


def test_without_keys_the_library_looks_for_credentials():
    filesystem: Any
    anonymous: Any
    filesystem, _ = access.filesystem("s3://bucket", StorageOptions())
    anonymous, _ = access.filesystem(
        "s3://bucket", StorageOptions.model_validate({"s3": {"anonymous": True}})
    )

    assert (filesystem.key, filesystem.secret, filesystem.anon) == (None, None, False)
    assert anonymous.anon


def test_an_unset_variable_is_named_when_the_store_is_opened(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    monkeypatch.setenv("EMPTY", "")
    options = StorageOptions.model_validate(
        {"s3": {"key": "${ENV:NO_SUCH_KEY}", "secret": "${ENV:EMPTY}"}}
    )

    with pytest.raises(ConfigError, match=r"storage.s3.key: the environment variable NO_SUCH_KEY "):
        access.open_store("s3://bucket/out", options, private="_x")
    with pytest.raises(ConfigError, match=r"storage.s3.secret: .* EMPTY is not set; set it, or re"):
        look_up("${ENV:EMPTY}", "storage.s3.secret")
    assert look_up(None, "storage.s3.secret") is None


@pytest.mark.parametrize(
    "section",
    [
        {"s3": {"key": SECRET, "secret": "${ENV:A}"}},
        {"s3": {"key": "${ENV:A}", "secret": SECRET}},
        {"s3": {"key": "${ENV:A}", "secret": f"${{ENV:A}}{SECRET}"}},
        {"s3": {"key": "${ENV:A}", "secret": "${ENV:A}", "token": SECRET}},
        {"s3": {"key": "${ENV:A}", "secret": 1234567}},
        {"gs": {"token": SECRET}},
        {"gs": {"token": {"private_key": SECRET}}},
        {"s3": SECRET},
        {"gs": [SECRET]},
        {"s3": {"endpoint_url": f"https://user:{SECRET}@host"}},
        {"s3": {"endpoint_url": f"https://host/?{SECRET}"}},
        {"gs": {"endpoint_url": f"https://host:{SECRET}"}},
        {"gs": {"endpoint_url": SECRET}},
    ],
)
def test_a_literal_secret_is_refused_and_not_repeated(section):
    with pytest.raises(pydantic.ValidationError) as caught:
        StorageOptions.model_validate(section)

    assert "hunter2" not in str(caught.value)
    assert "1234567" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"s3": {"key": "${ENV:A}"}}, "key and secret go together"),
        ({"s3": {"token": "${ENV:A}"}}, "token goes with key and secret"),
        (
            {"s3": {"key": "${ENV:A}", "secret": "${ENV:A}", "anonymous": True}},
            "anonymous goes without",
        ),
        ({"s3": {"profile": "x", "anonymous": True}}, "anonymous goes without"),
        ({"gs": {"token": "${ENV:A}", "anonymous": True}}, "anonymous goes without token"),
        ({"s3": {"regin": "x"}}, "Extra inputs"),
        ({"s3": {"anonymous": "yes"}}, "valid boolean"),
    ],
)
def test_options_that_do_not_go_together_are_refused(section, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        StorageOptions.model_validate(section)


def test_a_dump_names_the_variable_and_never_its_value(monkeypatch):
    monkeypatch.setenv("A_KEY", SECRET)
    options = StorageOptions.model_validate({"s3": {"key": "${ENV:A_KEY}", "secret": "${ENV:B}"}})
    access_dump = options.model_dump_json() + repr(options) + str(options.model_dump())

    assert "${ENV:A_KEY}" in access_dump
    assert SECRET not in access_dump


def test_local_jobs_load_no_library_for_urls(tmp_path):
    script = (
        "import sys\n"
        "from jaxpaged.job.spec import JobSpec\n"
        "from jaxpaged.storage import access\n"
        "from jaxpaged.storage.options import StorageOptions\n"
        f"store = access.open_store({str(tmp_path / 'out')!r}, StorageOptions(), private='_x')\n"
        "assert store.lock() and store.create('x', b'1')\n"
        "store.unlock()\n"
        "print(sorted({'fsspec', 's3fs', 'botocore', 'aiohttp'} & set(sys.modules)))\n"
    )

    assert run(script) == "[]\n"


@pytest.mark.parametrize(
    ("url", "package", "extra"), [("s3://b/x", "s3fs", "s3"), ("gs://b/x", "gcsfs", "gcs")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(url, package, extra):
    script = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"
        "from jaxpaged.errors import ConfigError\n"
        "from jaxpaged.storage import access\n"
        "from jaxpaged.storage.options import StorageOptions\n"
        f"try: access.open_store({url!r}, StorageOptions(), private='_x')\n"
        "except ConfigError as error: print(error)\n"
    )

    said = run(script)

    assert said == (
        f"{url[:5]} needs the package {package}; install it: pip install 'jaxpaged[{extra}]'\n"
    )


def test_options_reach_google_and_its_refusal_names_no_token():
    # In a process of its own, with a stand-in for gcsfs.
    script = (
        "import os, fsspec\n"
        "from fsspec.implementations.memory import MemoryFileSystem\n"
        "from jaxpaged.errors import ConfigError\n"
        "from jaxpaged.storage import access\n"
        "from jaxpaged.storage.options import StorageOptions\n"
        "class Stub(MemoryFileSystem):\n"
        "    protocol = 'gs'\n"
        "    def __init__(self, **settings):\n"
        "        super().__init__()\n"
        "        settings.pop('use_listings_cache')\n"
        "        print(sorted(settings.items()))\n"
        "        if settings.get('token') == 'wrong': raise ValueError('wrong is no token')\n"
        "fsspec.register_implementation('gs', Stub, clobber=True)\n"
        "os.environ['A_TOKEN'] = 'wrong'\n"
        "for section in ({}, {'anonymous': True, 'project': 'p', 'endpoint_url': 'http://h'},\n"
        "                {'token': '${ENV:A_TOKEN}'}):\n"
        "    try: access.filesystem('gs://b/x', StorageOptions.model_validate({'gs': section}))\n"
        "    except ConfigError as error: print(error, error.__context__)\n"
    )

    assert run(script).splitlines() == [
        "[]",
        "[('endpoint_url', 'http://h'), ('project', 'p'), ('token', 'anon')]",
        "[('token', 'wrong')]",
        "storage.gs: gcsfs cannot use these credentials (ValueError); correct them None",
    ]
