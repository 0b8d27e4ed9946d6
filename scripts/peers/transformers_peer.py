"""Hugging Face transformers on the CPU; needs transformers, torch and pyarrow.

The model is a folder in Hugging Face layout. `--batching static` is `generate` over batches of
rows alike in what they want and then in length; every row of a batch runs until the longest is
done, and what it did not want is thrown away. `--batching continuous` is `generate_batch`.
"""

from collections.abc import Mapping, Sequence

import peer
import torch
import transformers
from peer import Loaded, Row

BANDS = 8
"""Groups of rows that want about as many tokens."""

parser = peer.parser(__doc__)
parser.add_argument("--batching", choices=["static", "continuous"], default="static")
parser.add_argument("--batch-size", type=int, default=16)
options = parser.parse_args()


def batches(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows by what they want, and within a group of those by length."""
    ordered = sorted(rows, key=lambda row: row.max_tokens)
    size = -(-len(ordered) // BANDS)
    groups = (ordered[at : at + size] for at in range(0, len(ordered), size))
    by_length = [row for group in groups for row in sorted(group, key=lambda r: len(r.prompt_ids))]
    size = options.batch_size
    return [by_length[at : at + size] for at in range(0, len(by_length), size)]


def load(_: Sequence[Row]) -> Loaded:
    """The model in float32."""
    torch.set_num_threads(options.threads)
    is_static = options.batching == "static"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model,
        dtype=torch.float32,
        attn_implementation="sdpa",
    ).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run_static(rows: Sequence[Row]) -> Mapping[int, Sequence[int]]:
        done: dict[int, Sequence[int]] = {}
        for batch in batches(rows):
            width = max(len(row.prompt_ids) for row in batch)
            gaps = [width - len(row.prompt_ids) for row in batch]
            ids = [[0] * gap + row.prompt_ids for gap, row in zip(gaps, batch, strict=True)]
            mask = [[0] * gap + [1] * (width - gap) for gap in gaps]
            found = model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max(row.max_tokens for row in batch),
                do_sample=False,
                pad_token_id=0,
            )
            for row, new in zip(batch, found[:, width:].tolist(), strict=True):
                done[row.id] = new[: row.max_tokens]
        return done

    @torch.inference_mode()
    def run_continuous(rows: Sequence[Row]) -> Mapping[int, Sequence[int]]:
        config = transformers.GenerationConfig(
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
            max_new_tokens=max(row.max_tokens for row in rows),
            max_batch_tokens=options.max_num_batched_tokens,
        )
        manager = model.init_continuous_batching(generation_config=config)
        manager.start()
        names = {
            manager.add_request(row.prompt_ids, max_new_tokens=row.max_tokens): row.id
            for row in rows
        }
        done: dict[int, Sequence[int]] = {}
        while len(done) < len(rows):
            found = manager.get_result(timeout=600)
            if found is not None and found.is_finished():
                done[names[found.request_id]] = found.generated_tokens
        manager.stop(block=True)
        return done

    run = run_static if is_static else run_continuous
    version = f"{transformers.__version__}, torch {torch.__version__}"
    return Loaded(run, version, {"batching": options.batching, "dtype": "float32"})


peer.measure(options, load)
