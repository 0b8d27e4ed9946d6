"""Records of input files that nobody has to read."""

from jaxpaged.job.input.file_record import FileRecord


def file(name: str, *row_groups: tuple[int, int]) -> FileRecord:
    """A file of these runs of row groups."""
    return FileRecord(
        name=name,
        bytes=1,
        content=f"sha256:{'0' * 64}",
        footer="0" * 64,
        row_groups=row_groups,
        modified="",
        stamp="",
        hashed_at=0,
    )
