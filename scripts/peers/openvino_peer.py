"""OpenVINO GenAI's continuous batching on the CPU; needs openvino-genai and pyarrow.

The model is a folder of `optimum-cli export openvino --weight-format fp32`. Everything is float32:
by default weights would be rounded and the KV cache would have 8 bits. Prompts that are admitted
together do not find each other's prefix, so the first one runs some steps alone.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import openvino
import openvino_genai
import peer
from peer import Loaded, Row

FIRST_ALONE = 3
"""Steps that the first prompt runs ahead of the others."""

parser = peer.parser(__doc__)
parser.add_argument("--kv-gib", type=int, default=3)
options = parser.parse_args()


def load(_: Sequence[Row]) -> Loaded:
    """The pipeline, with its prefix cache on."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = options.kv_gib
    scheduler.max_num_seqs = options.max_num_seqs
    scheduler.max_num_batched_tokens = options.max_num_batched_tokens
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    properties = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "INFERENCE_NUM_THREADS": options.threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        options.model, scheduler, "CPU", properties
    )

    def run(rows: Sequence[Row]) -> Mapping[int, Sequence[int]]:
        handles = {}
        for row in rows:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = row.max_tokens
            config.ignore_eos = True
            config.do_sample = False
            config.eos_token_id = -1
            config.stop_token_ids = set()
            ids = openvino.Tensor(np.asarray([row.prompt_ids], np.int64))
            # Ids have no sign here.
            handles[row.id] = pipeline.add_request(row.id % 2**32, ids, config)
            if len(handles) == 1:
                for _ in range(FIRST_ALONE):
                    pipeline.step()
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return {id: handle.read_all()[0].generated_ids for id, handle in handles.items()}

    return Loaded(run, openvino_genai.__version__, {"kv_gib": options.kv_gib, "dtype": "float32"})


peer.measure(options, load)
