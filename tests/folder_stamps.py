"""What lies in a folder, to see what changed: bytes and times of files, by name."""

import pathlib

Stamps = dict[str, tuple[bytes, int]]


def of_parts(out: pathlib.Path) -> Stamps:
    """Of what readers see."""
    return _of(out, list(out.glob("*.parquet")))


def of_all(out: pathlib.Path) -> Stamps:
    """Of everything but who writes, and when."""
    paths = [path for path in out.rglob("*") if path.is_file()]
    return _of(out, [p for p in paths if "attempts" not in p.parts and p.name != "lock"])


def kept(before: Stamps, after: Stamps) -> bool:
    """Whether everything that was there is there as it was."""
    return before.items() <= after.items()


def _of(out: pathlib.Path, paths: list[pathlib.Path]) -> Stamps:
    return {
        str(path.relative_to(out)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths
    }
