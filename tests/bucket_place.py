"""A job's bucket on an S3 server, and readers of it who know nothing of the job."""

import io
import pathlib
from typing import Any

import fsspec
import pandas
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
from pyarrow.fs import S3FileSystem
from s3_proxy import S3Proxy
from s3_server import KEY, SECRET, section

from jaxpaged.job.output import output_view
from jaxpaged.job.spec import JobSpec
from jaxpaged.storage.object_store import ObjectStore

Row = dict[str, Any]


class BucketPlace:
    """Where a job reads and writes; the job goes through a proxy, its readers do not.

    Args:
        url: Of the bucket.
        filesystem: Reaches it.
        proxy: What the job has to go through.
        model: The job's.

    Attributes:
        out: The output's URL.
        proxy: The proxy.
        store: The output, for who looks at it.
    """

    def __init__(
        self,
        url: str,
        filesystem: fsspec.AbstractFileSystem,
        *,
        proxy: S3Proxy,
        model: pathlib.Path,
    ) -> None:
        self.out = f"{url}/out"
        self.proxy = proxy
        self._bucket = url.removeprefix("s3://")
        self.store = ObjectStore(
            filesystem, f"{self._bucket}/out", url=self.out, private=output_view.PRIVATE
        )
        self._files: Any = filesystem
        self._model = model
        self._arrow = S3FileSystem(
            access_key=KEY, secret_key=SECRET, endpoint_override=proxy.target, region="us-east-1"
        )

    def job(self, **sections: dict[str, Any]) -> dict[str, Any]:
        """What a job file would hold; sections are merged by key."""
        job: dict[str, Any] = {
            "input": {"path": self.out.replace("/out", "/in"), "prompt_column": "q"},
            "output": {"path": self.out, "rows_per_part": 4, "journal_interval": 0.0},
            "engine": {"max_num_seqs": 2},
            "storage": {"s3": section(self.proxy.endpoint)},
        }
        names = job.keys() | sections.keys()
        merged = {name: job.get(name, {}) | sections.get(name, {}) for name in names}
        return {"model": str(self._model), **merged}

    def spec(self, **sections: dict[str, Any]) -> JobSpec:
        return JobSpec.from_dict(self.job(**sections))

    def put(self, name: str, *, row_group_size: int | None = None, **columns: list) -> None:
        """Writes an input file."""
        data = io.BytesIO()
        pq.write_table(pa.table(columns), data, row_group_size=row_group_size)
        self._files.pipe_file(f"{self._bucket}/in/{name}", data.getvalue())

    def names(self, private: str = "") -> list[str]:
        """The objects of the output, or of a folder in its private one."""
        out, folder = f"{self._bucket}/out/", f"_jaxpaged/{private}/" if private else ""
        return [name.removeprefix(out) for name in self._files.find(f"{out}{folder}")]

    def read(self, name: str) -> bytes:
        return self._files.cat_file(f"{self._bucket}/out/{name}")

    def delete(self, name: str) -> None:
        self._files.rm_file(f"{self._bucket}/out/{name}")

    def by_pyarrow(self) -> list[Row]:
        place = f"{self._bucket}/out"
        found = pyarrow.dataset.dataset(place, filesystem=self._arrow, format="parquet")
        return found.to_table().to_pylist()

    def by_pandas(self) -> list[Row]:
        # With s3fs, whose listings would be old ones.
        options = {
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": self.proxy.target,
            "use_listings_cache": False,
        }
        frame = pandas.read_parquet(self.out, storage_options=options, dtype_backend="pyarrow")
        return pa.Table.from_pandas(frame, preserve_index=False).to_pylist()

    def rows(self) -> list[Row]:
        """What readers see, who all see the same; none before there is a part."""
        if not any(name.startswith("part-") for name in self.names()):
            return []
        rows = self.by_pyarrow()
        assert self.by_pandas() == rows
        return rows
