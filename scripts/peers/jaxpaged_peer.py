"""jaxpaged on the same work, as a whole job: Parquet in, Parquet out.

The job compiles what it needs before its first row; that counts as load, as with the others.
"""

import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import bench_job
import peer
import pyarrow as pa
from bench_job import Settings
from peer import Row
from pyarrow import dataset, parquet

from jaxpaged import Engine, EngineConfig, SamplingParams
from jaxpaged.cache.capacity import kv_bytes_per_token
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.source import locate


def engine_alone(settings: Settings, max_model_len: int) -> peer.Runner:
    """Completes rows one by one, by an engine like the job's."""
    config = EngineConfig(
        dtype=settings.dtype,
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        deterministic=settings.deterministic,
    )
    engine = Engine.load(settings.model, config)
    engine.warm_up()

    def run(rows: Sequence[Row]) -> Mapping[int, Sequence[int]]:
        done = {}
        for row in rows:
            params = SamplingParams(max_tokens=row.max_tokens, ignore_eos=True)
            (done[row.id],) = engine.generate([row.prompt_ids], params)
        return {row: completion.token_ids for row, completion in done.items()}

    return run


def main() -> None:
    """Run the job, print its figures, write its tokens where the other peers write theirs."""
    parser = peer.parser(__doc__)
    parser.add_argument("--kv-gib", type=int, default=3)
    options = parser.parse_args()
    config = open_checkpoint(locate(options.model)).config
    token_bytes = kv_bytes_per_token(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        kv_dtype="float32",
    )
    block_size = 16
    settings = Settings(
        model=options.model,
        dtype="float32",
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=block_size,
        num_blocks=options.kv_gib * 2**30 // (token_bytes * block_size),
        deterministic=True,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        workload = bench_job.load_workload(options.workload, options.limit, folder)
        spec = bench_job.job_spec(folder, workload, settings)
        load_before, others = os.getloadavg()[0], peer.busy_elsewhere()
        figures = bench_job.run(spec)
        others = peer.busy_elsewhere() - others
        rows = dataset.dataset(folder / "output", format="parquet").to_table()
    rows_alone = peer.read_rows(options)
    longest = max(len(row.prompt_ids) + row.max_tokens for row in rows_alone)
    first_token_ms = peer.first_token_ms(rows_alone, engine_alone(settings, longest))
    columns = {"id": rows["id"].cast(pa.int64()), "token_ids": rows["token_ids"]}
    parquet.write_table(pa.table(columns), options.out)
    seconds = sum(figures[f"{part}_seconds"] for part in ("load", "compile", "wall"))
    figures |= {
        "wanted_tokens": sum(workload["max_tokens"].to_pylist()),
        "kv_gib": options.kv_gib,
        "first_token_ms": first_token_ms,
        "warm_up_seconds": figures["compile_seconds"],
        "load_before": round(load_before, 2),
        "other_cores": round(max(0.0, others) / seconds, 2),
    }
    print(json.dumps(figures))


main()
