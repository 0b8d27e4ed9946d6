"""LoRA adapters as PEFT computes them, and as merged weights do; rows of several in one batch.

tests/golden/README.md says how PEFT's side was computed.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import safetensors.numpy
import tiny_adapter
from flax import nnx
from forward import last_logits
from tiny import write_tiny_model
from tiny_adapter import ATTENTION, merge, write_tiny_adapter

from jaxpaged import Engine, EngineConfig, Request, SamplingParams
from jaxpaged.convert import convert
from jaxpaged.engine import batch, lanes, memory, model_runner
from jaxpaged.errors import CapacityError, CheckpointError
from jaxpaged.model import adapters, unpaged, weights
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.checkpoint.adapter import open_adapters
from jaxpaged.model.llama import Llama
from jaxpaged.request import Completion
from jaxpaged.scheduler.plan import StepPlan

TOLERANCE = 1e-4
GOLDEN = json.loads((parity.GOLDEN / "adapters.json").read_text())
FAMILIES = parity.cases()

# Routed experts have no kernels for CPUs.
BY_KERNELS = [name for name in GOLDEN if name != "mixtral_attention"]

CONFIG = EngineConfig(max_model_len=64, max_num_seqs=8, block_size=4, num_blocks=160)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A tiny model with adapters of several ranks, targets and strengths."""

    model: pathlib.Path
    adapters: dict[str, str]
    merged: dict[str | None, pathlib.Path]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Callable[[str], Tuned]:
    """The tiny model of a family, with what adapters make of it."""
    made: dict[str, Tuned] = {}

    def make(family: str) -> Tuned:
        if family in made:
            return made[family]
        place = tmp_path_factory.mktemp(family)
        model = FAMILIES[family].write(place / "model")
        fused = {"targets": ("qkv_proj", "gate_up_proj", "o_proj")} if family == "phi3" else {}
        some = {"targets": ("o_proj", "down_proj")}
        found = {
            "four": write_tiny_adapter(place / "four", model, rank=4, seed=1, **fused),
            "nine": write_tiny_adapter(
                place / "nine", model, rank=9, seed=2, use_rslora=True, **some
            ),
            "odd": write_tiny_adapter(
                place / "odd",
                model,
                rank=3,
                seed=3,
                layers_to_transform=[1],
                lora_alpha=-2,
                **fused,
            ),
        }
        merged: dict[str | None, pathlib.Path] = {None: model}
        merged |= {name: merge(place / f"m-{name}", model, one) for name, one in found.items()}
        made[family] = Tuned(model, {name: str(one) for name, one in found.items()}, merged)
        return made[family]

    return make


def load(folder: pathlib.Path, paths: dict[str, str], **options: object) -> Llama:
    checkpoint = open_checkpoint(folder)
    given: dict[str, Any] = {"layer_loop": "scan", **options}
    model = weights.load(checkpoint, dtype=jnp.dtype("float32"), max_model_len=64, **given)
    adapters.load(model, open_adapters(paths, checkpoint.config))
    return model


def write_golden(name: str, place: pathlib.Path) -> tuple[pathlib.Path, dict[str, str]]:
    """The model and the adapter that PEFT read."""
    case = GOLDEN[name]
    family = FAMILIES[case["model"]]
    write_tiny_model(place / "model", family.config, family.shapes, seed=family.seed)
    tensors = tiny_adapter.random_factors(case["shapes"], case["seed"])
    digest = hashlib.sha256(b"".join(tensors[key].tobytes() for key in sorted(tensors)))
    assert digest.hexdigest() == case["weights"], "tiny adapters changed: make the fixture again"
    tiny_adapter.write_adapter(place / name, case["config"], tensors)
    return place / "model", {"it": str(place / name)}


_unpaged = jax.jit(unpaged.logits, static_argnums=0)


def logits(
    model: Llama, ids: list[int], places: list[int], adapter: int | None = None
) -> np.ndarray:
    """Logits behind some tokens, by the decoder without a pool."""
    graph, state = nnx.split(model)
    number = None if adapter is None else np.asarray(adapter, np.int32)
    return np.asarray(_unpaged(graph, state, np.array(ids), np.array(places), number))


def complete(
    engine: Engine, rows: list[tuple[int, str | None]], **params: object
) -> list[Completion]:
    """Completions of rows, each a prompt's length and an adapter, in one batch."""
    given: dict[str, Any] = {"max_tokens": 8, "logprobs": 1, "ignore_eos": True, **params}
    sampling = SamplingParams(**given)
    prompt = FAMILIES["llama"].prompt_ids
    for index, (length, adapter) in enumerate(rows):
        ids = tuple(prompt[:length])
        engine.add_request(
            Request(request_id=index, prompt_ids=ids, params=sampling, adapter=adapter)
        )
    done: dict[int, Completion] = {}
    while engine.has_work():
        done |= {completion.request_id: completion for completion in engine.step()}
        engine.check_integrity()
    return [done[index] for index in range(len(rows))]


def bare(completion: Completion) -> str:
    """The completion without what is the batch's, as text: equal to the bit."""
    return repr(dataclasses.replace(completion, request_id=0, cached_tokens=0))


@pytest.mark.parametrize(
    ("attention", "name"),
    [*(("xla", name) for name in GOLDEN), *(("llvm", name) for name in BY_KERNELS)],
)
def test_logits_and_tokens_are_those_of_peft(attention, name, tmp_path) -> None:
    case = GOLDEN[name]
    folder, paths = write_golden(name, tmp_path)
    with np.load(parity.GOLDEN / "adapters.npz") as arrays:
        expected = arrays[name]
    family = FAMILIES[case["model"]]
    ids = family.prompt_ids + case["tokens"]
    model = load(folder, paths, attention=attention)
    for position, row in list(zip(family.positions, expected, strict=True))[8::5]:
        found = last_logits(model, ids[: position + 1], token_budget=9, block_size=4, adapter=1)
        np.testing.assert_allclose(found, row, atol=TOLERANCE)
    config = dataclasses.replace(CONFIG, attention=attention)
    engine = Engine.load(folder, config, adapters=paths)
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    (found,) = engine.generate([family.prompt_ids], sampling, adapter="it")
    assert list(found.token_ids) == case["tokens"]
    # The adapter matters, or it would prove nothing.
    (plain,) = engine.generate([family.prompt_ids], sampling)
    assert list(plain.token_ids) == family.tokens != case["tokens"]


@pytest.mark.parametrize("name", GOLDEN)
def test_decoder_without_a_pool_gives_those_logits_too(name, tmp_path) -> None:
    folder, paths = write_golden(name, tmp_path)
    family = FAMILIES[GOLDEN[name]["model"]]
    ids = family.prompt_ids + GOLDEN[name]["tokens"]
    found = logits(load(folder, paths), ids, family.positions, adapter=1)
    with np.load(parity.GOLDEN / "adapters.npz") as arrays:
        np.testing.assert_allclose(found, arrays[name], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "loop"),
    [
        *((family, "scan") for family in ("llama_biases", "qwen2", "qwen3", "phi3", "gemma2")),
        *((family, "unrolled") for family in ("qwen2", "phi3")),
    ],
)
def test_each_adapter_is_the_merged_model(tuned, family, loop) -> None:
    found = tuned(family)
    model = load(found.model, found.adapters, layer_loop=loop)
    ids, places = FAMILIES[family].prompt_ids, [0, 8, 31, 44]
    seen = []
    for number, name in enumerate([None, *found.adapters]):
        merged = load(found.merged[name], {}, layer_loop=loop)
        expected = logits(merged, ids, places)
        mine = logits(model, ids, places, adapter=number)
        np.testing.assert_allclose(mine, expected, atol=TOLERANCE)
        seen.append(expected)
    assert min(np.abs(one - seen[0]).max() for one in seen[1:]) > 0.1


def test_a_fused_adapter_fits_the_converted_model(tuned, tmp_path) -> None:
    found = tuned("phi3")
    converted = convert(str(found.model), tmp_path / "converted")
    ids, places = FAMILIES["phi3"].prompt_ids, [0, 8, 31, 44]
    one, other = (load(folder, found.adapters) for folder in (found.model, converted))
    for number in range(len(found.adapters) + 1):
        expected = logits(one, ids, places, adapter=number)
        np.testing.assert_array_equal(logits(other, ids, places, adapter=number), expected)


@pytest.mark.parametrize("attention", ["xla", "llvm"])
@pytest.mark.parametrize("family", ["qwen2", "phi3", "gemma2"])
def test_rows_of_all_adapters_in_one_batch_give_the_merged_models_tokens(
    tuned, family, attention
) -> None:
    found = tuned(family)
    config = dataclasses.replace(CONFIG, attention=attention)
    rows = [(length, name) for length in (33, 5, 18) for name in found.merged]
    together = complete(Engine.load(found.model, config, adapters=found.adapters), rows)
    for name, folder in found.merged.items():
        engine = Engine.load(folder, config)
        merged = complete(engine, [(length, None) for length in (33, 5, 18)])
        mine = [one for one, row in zip(together, rows, strict=True) if row[1] == name]
        for one, other in zip(mine, merged, strict=True):
            assert one.token_ids == other.token_ids
            for left, right in zip(one.logprobs, other.logprobs, strict=True):
                assert left.logprob == pytest.approx(right.logprob, abs=TOLERANCE)


def shuffled(found: Tuned) -> Iterator[list[tuple[int, str | None]]]:
    rows = [(length, name) for name in found.merged for length in (33, 5, 17, 18)]
    random = np.random.default_rng(3)
    for _ in range(2):
        yield [rows[place] for place in random.permutation(len(rows))]


@pytest.mark.parametrize(
    ("attention", "dtype"), [("xla", "float32"), ("llvm", "float32"), ("xla", "bfloat16")]
)
@pytest.mark.parametrize("cache", [True, False])
def test_a_rows_bits_are_its_own(tuned, attention, dtype, cache) -> None:
    found = tuned("qwen2")
    config = dataclasses.replace(
        CONFIG,
        attention=attention,
        dtype=dtype,
        deterministic=True,
        prefix_cache=cache,
        max_num_batched_tokens=21,
        num_blocks=28,
        preemption="recompute",
        watermark=0.0,
    )
    plain = dataclasses.replace(
        config, max_num_seqs=1, max_num_batched_tokens=None, prefix_cache=False
    )
    engine = Engine.load(found.model, plain, adapters=found.adapters)
    alone: dict[tuple[int, str | None], str] = {}
    for row in next(shuffled(found)):
        (one,) = complete(engine, [row])
        alone[row] = bare(one)
    assert len(set(alone.values())) == len(alone)
    engine = Engine.load(found.model, config, adapters=found.adapters)
    for rows in shuffled(found):
        together = complete(engine, rows)
        assert [bare(one) for one in together] == [alone[row] for row in rows]
    assert engine.stats.recomputes > 0
    assert (engine.stats.cached_tokens > 0) == cache


@pytest.mark.parametrize("attention", ["xla", "llvm"])
def test_float32_rows_without_an_adapter_have_the_bits_of_a_job_without_any(
    tuned, attention
) -> None:
    found = tuned("qwen2")
    config = dataclasses.replace(CONFIG, attention=attention, deterministic=True)
    rows: list[tuple[int, str | None]] = [(33, None), (5, None), (18, None)]
    plain = complete(Engine.load(found.model, config), rows)
    engine = Engine.load(found.model, config, adapters=found.adapters)
    assert list(map(bare, complete(engine, [*rows, (9, "four")])))[:3] == list(map(bare, plain))


def test_swapped_rows_and_several_samples_keep_their_adapter(tuned) -> None:
    found = tuned("qwen2")
    tight = dataclasses.replace(
        CONFIG, num_blocks=40, preemption="swap", swap_space=0.1, watermark=0.0
    )
    rows = [(length, name) for name in found.merged for length in (33, 18)]
    params = {"n": 2, "temperature": 0.8, "seed": 5, "max_tokens": 12}
    engine = Engine.load(found.model, tight, adapters=found.adapters)
    mixed = complete(engine, rows, **params)
    assert engine.stats.swaps > 0
    wide = dataclasses.replace(CONFIG, max_num_seqs=4)
    for name in found.merged:
        engine = Engine.load(found.model, wide, adapters=found.adapters)
        mine = [row for row in rows if row[1] == name]
        expected = [bare(one) for one in complete(engine, mine, **params)]
        assert [bare(one) for one, row in zip(mixed, rows, strict=True) if row[1] == name] == (
            expected
        )


def test_beams_and_prompt_scores_are_the_merged_models(tuned) -> None:
    found = tuned("qwen2")
    engine = Engine.load(found.model, CONFIG, adapters=found.adapters)
    for params in ({"beam_width": 3}, {"prompt_logprobs": 2, "max_tokens": 1}):
        for name in ("four", "odd"):
            (mine,) = complete(engine, [(21, name)], **params)
            (other,) = complete(Engine.load(found.merged[name], CONFIG), [(21, None)], **params)
            assert mine.token_ids == other.token_ids
            scores = [
                np.array([token.logprob for token in (*(one.prompt_logprobs or ()), *one.logprobs)])
                for one in (mine, other)
            ]
            np.testing.assert_allclose(*(np.float64(one) for one in scores), atol=TOLERANCE)


def test_prompts_of_different_adapters_share_no_blocks(tuned) -> None:
    found = tuned("qwen2")
    engine = Engine.load(found.model, CONFIG, adapters=found.adapters)
    expected = complete(Engine.load(found.merged["four"], CONFIG), [(40, None)])
    for name in (None, "nine", "odd"):
        complete(engine, [(40, name)])
    # The same tokens are in the pool three times, and none of them are this adapter's.
    (first,) = complete(engine, [(40, "four")])
    assert first.cached_tokens == 0
    assert first.token_ids == expected[0].token_ids
    (again,) = complete(engine, [(40, "four")])
    assert again.cached_tokens == 36
    assert bare(again) == bare(first)


def test_an_unknown_adapter_is_a_row_error(tuned) -> None:
    found = tuned("qwen2")
    engine = Engine.load(found.model, CONFIG, adapters=found.adapters)
    wrong, right = complete(engine, [(5, "fuor"), (5, "four")])
    assert wrong.error_code == "unknown_adapter"
    assert wrong.error_message == "no adapter 'fuor'; the engine has: 'four', 'nine', 'odd'"
    assert right.error_code is None
    (none,) = complete(Engine.load(found.model, CONFIG), [(5, "four")])
    assert none.error_message == "no adapter 'four'; the engine has: none"


def lowered(model: Llama) -> str:
    """The text of a step's program."""
    shapes = batch.batch_shapes(
        max_num_seqs=8,
        token_budget=64,
        max_model_len=64,
        capacity=batch.PoolCapacity(num_blocks=16, block_size=4, bytes_per_token=1),
        is_deterministic=True,
    )
    state = lanes.allocate(
        shapes.num_lanes,
        max_model_len=64,
        table_width=shapes.table_width,
        vocab_size=model.config.vocab_size,
        has_adapters=bool(model.adapter_names),
    )
    pool = model_runner.allocate_pool(model, 16, 4, kv_dtype="float32")
    graph, state_of_model = nnx.split(model)
    arrays = batch.build(batch.lay_out(StepPlan()), shapes.buckets()[0], shapes)
    forward = jax.jit(model_runner.forward, static_argnums=(0, 1))
    return forward.lower(graph, shapes, state_of_model, pool, state, arrays).as_text()


def test_a_model_without_adapters_has_the_program_it_had(tuned) -> None:
    """Nothing of adapters is in it: its arguments and products are counted."""
    found = tuned("llama")
    bare_model, adapted = load(found.model, {}), load(found.model, found.adapters)
    plain = weights.load(
        open_checkpoint(found.model), dtype=jnp.dtype("float32"), layer_loop="scan"
    )
    text = lowered(plain)
    assert lowered(bare_model) == text
    # Seven linear maps, and two products of decode attention.
    assert text.count("stablehlo.dot_general") == 9
    assert lowered(adapted).count("stablehlo.dot_general") == 9 + 2 * 7
    assert lanes.allocate(1, max_model_len=8, table_width=2, vocab_size=8).adapters is None


def test_the_arrays_take_what_the_plan_counts(tuned) -> None:
    found = tuned("phi3")
    config = open_checkpoint(found.model).config
    opened = open_adapters(found.adapters, config)
    counted = sum(int(np.prod(shape)) for shape in adapters.shapes(config, opened).values())

    def numbers(model: Llama) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))

    plain, loaded = load(found.model, {}), load(found.model, found.adapters)

    def made() -> Llama:
        model = Llama(config, dtype=jnp.dtype("float32"), layer_loop="scan")
        adapters.attach(model, opened)
        return model

    abstract = nnx.eval_shape(made)
    assert numbers(loaded) - numbers(plain) == counted > 0
    assert numbers(abstract) == numbers(loaded)
    assert abstract.adapter_names == loaded.adapter_names == ("four", "nine", "odd")


def test_infinities_stay_with_their_adapter(tuned, tmp_path) -> None:
    """What another adapter makes of a row may overflow: it is left out, not multiplied by zero."""
    found = tuned("llama")
    wild = write_tiny_adapter(
        tmp_path / "wild", found.model, targets=ATTENTION, strength=1e-4, seed=9
    )
    tensors = safetensors.numpy.load_file(wild / "adapter_model.safetensors")
    config = json.loads((wild / "adapter_config.json").read_text())
    huge = {
        name: tensor * np.float32(5e37 if "lora_A" in name else 1)
        for name, tensor in tensors.items()
    }
    tiny_adapter.write_adapter(wild, config, huge)
    engine = Engine.load(found.model, CONFIG, adapters={"wild": str(wild), **found.adapters})
    rows = [(9, "wild"), (9, None), (9, "four")]
    broken, base, four = complete(engine, rows)
    assert broken.error_code == "nonfinite_logits"
    expected = complete(Engine.load(found.model, CONFIG, adapters=found.adapters), rows[1:])
    assert [bare(base), bare(four)] == list(map(bare, expected))


def test_factors_that_are_not_finite_are_refused(tuned, tmp_path) -> None:
    found = tuned("llama")
    bad = write_tiny_adapter(tmp_path / "bad", found.model, targets=("q_proj",))
    tensors = safetensors.numpy.load_file(bad / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    tensors[name][3, 1] = np.nan
    config = json.loads((bad / "adapter_config.json").read_text())
    tiny_adapter.write_adapter(bad, config, tensors)
    with pytest.raises(CheckpointError, match=rf"{name} holds numbers that are not finite"):
        Engine.load(found.model, CONFIG, adapters={"bad": str(bad)})


def test_adapters_count_where_weights_have_to_fit(tuned) -> None:
    found = tuned("llama")
    config = open_checkpoint(found.model).config
    opened = open_adapters(found.adapters, config)
    shapes = open_checkpoint(found.model).shapes()
    numbers = sum(int(np.prod(shape)) for shape in shapes.values())
    both = shapes | adapters.shapes(config, opened)
    memory.check_weights(shapes, dtype="float32", available=4 * numbers)
    with pytest.raises(CapacityError, match="the weights in float32"):
        memory.check_weights(both, dtype="float32", available=4 * numbers)


@pytest.mark.parametrize("columns", [16, 48])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_products_give_a_row_the_same_bits_from_64_rows_up(columns, dtype) -> None:
    """What `RANK_TILE` rests on, measured on the machine at hand."""
    random = np.random.default_rng(0)
    product = jax.jit(lambda x, kernel: x @ kernel)
    for width, out in ((64, columns), (576, columns), (1536, columns), (columns, 576)):
        x = jnp.asarray(random.standard_normal((512, width)), dtype)
        kernel = jnp.asarray(random.standard_normal((width, out)), dtype)
        whole = np.asarray(product(x, kernel))
        for rows in (64, 80, 128, 192, 256, 448):
            assert np.array_equal(np.asarray(product(x[:rows], kernel)), whole[:rows])
