"""Folders of LoRA adapters: what is honoured, what is refused, and what the refusal says."""

import json
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.numpy
from parity import cases
from tiny import write_json, write_tiny_llama
from tiny_adapter import ALL, ATTENTION, PREFIX, adapter_config, write_adapter, write_tiny_adapter

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.model.checkpoint import adapter_config as configs
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.checkpoint.adapter import Adapter, open_adapters

Q_0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=3)


@pytest.fixture
def reopen(tmp_path, model) -> Callable[..., Adapter]:
    """Opens an adapter once its configuration or its tensors were changed."""

    def change(
        tensors: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
        folder: pathlib.Path | None = None,
        **config: object,
    ) -> Adapter:
        folder = folder or write_tiny_adapter(tmp_path / "adapter", model)
        written = json.loads((folder / "adapter_config.json").read_text())
        found = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
        tensors(found)
        write_adapter(folder, written | config, found)
        return open_one(folder, model)

    return change


def open_one(folder: pathlib.Path, model: pathlib.Path) -> Adapter:
    return open_adapters({"it": str(folder)}, open_checkpoint(model).config)["it"]


def test_factors_are_the_files_with_the_scale_in_the_second_one(model, tmp_path) -> None:
    folder = write_tiny_adapter(tmp_path / "a", model, rank=6, lora_alpha=15)
    found = open_one(folder, model)
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    assert found.ranks == dict.fromkeys(found.ranks, 6)
    assert {name.split(".")[1] for name in found.ranks} == set(ALL)
    for layer in range(3):
        factors = found.factors(layer, "mlp.down_proj")
        name = f"{PREFIX}model.layers.{layer}.mlp.down_proj"
        assert factors is not None
        assert np.array_equal(factors.a, tensors[f"{name}.lora_A.weight"])
        expected = tensors[f"{name}.lora_B.weight"].astype(np.float64) * (15 / 6)
        assert np.array_equal(factors.b, expected)


def test_ranks_alphas_and_stabilised_scales_follow_their_patterns(model, tmp_path) -> None:
    folder = write_tiny_adapter(
        tmp_path / "a",
        model,
        rank=4,
        lora_alpha=8,
        use_rslora=True,
        rank_pattern={"q_proj": 9, r"layers\.[12]\.mlp\.up_proj": 1},
        alpha_pattern={f"^{Q_0}": 27, ".*down_proj": 2.5},
    )
    found = open_one(folder, model)
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    assert (found.ranks["self_attn.q_proj"], found.ranks["mlp.up_proj"]) == (9, 4)

    def scale(layer: int, name: str) -> float:
        factors = found.factors(layer, name)
        assert factors is not None
        stored = tensors[f"{PREFIX}model.layers.{layer}.{name}.lora_B.weight"]
        return float((factors.b / stored).mean())

    assert scale(0, "self_attn.q_proj") == pytest.approx(27 / 3)
    assert scale(1, "self_attn.q_proj") == pytest.approx(8 / 3)
    assert scale(0, "mlp.up_proj") == pytest.approx(8 / 2)
    assert scale(1, "mlp.up_proj") == pytest.approx(8)
    assert scale(2, "mlp.down_proj") == pytest.approx(2.5 / 2)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"target_modules": ["q_proj"]}, {(layer, "q_proj") for layer in range(3)}),
        ({"target_modules": [Q_0, "v_proj"]}, {(0, "q_proj"), *((n, "v_proj") for n in range(3))}),
        # As whole words between dots.
        ({"target_modules": ["proj", "self_attn.k_proj"]}, {(n, "k_proj") for n in range(3)}),
        ({"target_modules": "all-linear"}, {(n, name) for n in range(3) for name in ALL}),
        (
            {"target_modules": "ALL-linear", "exclude_modules": [*ATTENTION, "up_proj"]},
            {(n, name) for n in range(3) for name in ("gate_proj", "down_proj")},
        ),
        ({"target_modules": r".*\.2\..*(q|o)_proj"}, {(2, "q_proj"), (2, "o_proj")}),
        (
            {"target_modules": ".*up_proj", "exclude_modules": r".*\.1\..*"},
            {(0, "up_proj"), (2, "up_proj")},
        ),
        (
            {"target_modules": ["o_proj"], "layers_to_transform": [0, 2]},
            {(0, "o_proj"), (2, "o_proj")},
        ),
        (
            {"target_modules": ["o_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
            {(1, "o_proj")},
        ),
        (
            {"target_modules": ["o_proj"], "layers_to_transform": []},
            {(n, "o_proj") for n in range(3)},
        ),
    ],
)
def test_targets_are_those_of_peft(config, expected) -> None:
    names = [
        f"model.layers.{layer}.{'self_attn' if name in ATTENTION else 'mlp'}.{name}"
        for layer in range(3)
        for name in ALL
    ]
    found = configs.parse(adapter_config(**config), "x").targeted(names)
    assert {(int(name.split(".")[2]), name.split(".")[4]) for name in found} == expected


def test_fused_maps_share_the_first_factor_and_cut_the_second(tmp_path) -> None:
    folder = cases()["phi3"].write(tmp_path / "phi3")
    written = write_tiny_adapter(tmp_path / "a", folder, targets=("qkv_proj", "gate_up_proj"))
    found = open_one(written, folder)
    assert set(found.ranks) == {
        *(f"self_attn.{name}" for name in ATTENTION[:3]),
        "mlp.gate_proj",
        "mlp.up_proj",
    }
    tensors = safetensors.numpy.load_file(written / "adapter_model.safetensors")
    parts = [found.factors(1, f"self_attn.{name}") for name in ATTENTION[:3]]
    whole = tensors[f"{PREFIX}model.layers.1.self_attn.qkv_proj.lora_B.weight"]
    assert [len(part.b) for part in parts if part] == [64, 32, 32]
    cut = np.concatenate([part.b for part in parts if part])
    np.testing.assert_allclose(cut, whole * 2.0)
    assert len({part.a.tobytes() for part in parts if part}) == 1
    assert found.factors(1, "self_attn.o_proj") is None


REFUSED = [
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
    ({"use_dora": True}, "use_dora is True: DoRA scales the columns"),
    ({"bias": "all"}, "bias is 'all': only \"none\""),
    ({"bias": "lora_only"}, "bias is 'lora_only'"),
    ({"lora_bias": True}, "lora_bias is True"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]: .* whole modules"),
    ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication is"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices is"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is"),
    ({"use_qalora": True}, "use_qalora is True"),
    ({"megatron_config": {"a": 1}}, "megatron_config is"),
    ({"a_key_of_tomorrow": {"on": True}}, "a_key_of_tomorrow is .*not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4': .* changed"),
    ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
    ({"r": 0}, "r must be a whole number from 1 to 4096, found 0"),
    ({"r": "8"}, "r must be a whole number"),
    ({"r": True}, "r must be a whole number"),
    ({"r": None}, "r must be a whole number"),
    ({"lora_alpha": None}, "lora_alpha must be a finite number, found None"),
    ({"lora_alpha": float("nan")}, "lora_alpha must be a finite number"),
    ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\] must be a whole number"),
    ({"rank_pattern": [1]}, "rank_pattern must be an object"),
    ({"alpha_pattern": {"q_proj": "8"}}, r"alpha_pattern\['q_proj'\] must be a finite number"),
    ({"use_rslora": 1}, "use_rslora must be true or false"),
    ({"target_modules": None}, "target_modules must be a list of names, a regular expression or"),
    ({"target_modules": []}, "target_modules must be a list of names"),
    ({"target_modules": [5]}, "target_modules must be a list of names"),
    (
        {"target_modules": ["c_attn"]},
        "target_modules name no linear map of this model; it has self",
    ),
    (
        {"target_modules": "(?=x).*"},
        "is not a regular expression in RE2's syntax, which has neither",
    ),
    ({"target_modules": "("}, "is not a regular expression"),
    ({"rank_pattern": {"(": 4}}, "rank_pattern: .* is not a regular expression"),
    ({"layers_to_transform": ["1"]}, "layers_to_transform must be numbers of layers"),
    ({"layers_to_transform": -1}, "layers_to_transform must be numbers of layers"),
    ({"layers_to_transform": [1], "layers_pattern": "h"}, "layers_pattern is 'h'"),
    (
        {"layers_to_transform": [1], "target_modules": ".*q_proj"},
        "layers_to_transform goes with a list of target_modules",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(reopen, config, message) -> None:
    with pytest.raises(CheckpointError, match=rf"adapter_config\.json: .*{message}"):
        reopen(**config)


@pytest.mark.parametrize(
    "changes", [{"target_modules": "\ud800.*"}, {"rank_pattern": {"\ud800": 4}}]
)
def test_expression_that_is_no_unicode_is_refused(tmp_path, model, changes) -> None:
    folder = write_tiny_adapter(tmp_path / "adapter", model)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match="is not a regular expression"):
        open_one(folder, model)


@pytest.mark.parametrize(
    "config",
    [
        {"base_model_name_or_path": "somebody/another", "revision": "x", "task_type": None},
        {"lora_dropout": 0.3, "inference_mode": False, "peft_version": "9.9"},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"a_key_of_tomorrow": None, "another": False, "and_more": {}},
        {"use_rslora": None, "rank_pattern": None, "bias": None},
    ],
)
def test_what_changes_nothing_is_taken(reopen, config) -> None:
    assert reopen(**config).ranks["self_attn.q_proj"] == 4


def test_a_pattern_that_would_take_for_ever_takes_no_time(reopen) -> None:
    with pytest.raises(CheckpointError, match="name no linear map"):
        reopen(target_modules="(.*)*(.*)*(.*)*(.*)*(.*)*(.*)*(.*)*(.*)*!")


def drop(*names: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in names:
            del tensors[PREFIX + name]

    return change


def put(name: str, *shape: int) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = np.ones(shape, np.float32)

    return change


TENSORS = [
    (drop(f"{Q_0}.lora_B.weight"), rf"tensor {PREFIX}{Q_0}.lora_B.weight missing, which target"),
    (put(f"{PREFIX}{Q_0}.lora_A.weight", 5, 32), r"has shape \[5, 32\]; .* ask for \[4, 32\]"),
    (put(f"{PREFIX}{Q_0}.lora_B.weight", 32, 5), r"has shape \[32, 5\]; .* ask for \[32, 4\]"),
    (put(f"{PREFIX}{Q_0}.lora_A.weight", 4, 31), r"has shape \[4, 31\]; .* ask for \[4, 32\]"),
    (put("x.lora_A.weight", 4, 4), "tensor x.lora_A.weight would not be used"),
    (put(f"{PREFIX}model.layers.3.self_attn.q_proj.lora_A.weight", 4, 32), "would not be used"),
    (put(f"{PREFIX}{Q_0}.lora_A.default.weight", 4, 32), "would not be used"),
    (put(f"{PREFIX}{Q_0}.lora_B.bias", 32), "biases in an adapter"),
    (put(f"{PREFIX}{Q_0}.lora_magnitude_vector", 32), "DoRA is not supported"),
    (put(f"{PREFIX}model.embed_tokens.lora_embedding_A", 4, 272), "an adapted embedding or head"),
    (put(f"{PREFIX}lm_head.lora_A.weight", 4, 32), "an adapted head"),
    (put(f"{PREFIX}model.embed_tokens.weight", 272, 32), "an adapted embedding"),
    (put(f"{PREFIX}model.layers.0.mlp.experts.1.up_proj.lora_A.weight", 4, 32), "routed experts"),
    (put(f"{PREFIX}model.layers.0.mlp.gate.lora_A.weight", 4, 32), "routed experts"),
]


@pytest.mark.parametrize(("change", "message"), TENSORS)
def test_tensors_that_do_not_fit_are_named(reopen, change, message) -> None:
    with pytest.raises(CheckpointError, match=rf"adapter_model\.safetensors: .*{message}"):
        reopen(change)


def test_an_adapter_of_another_model_is_refused(model, tmp_path) -> None:
    other = write_tiny_llama(tmp_path / "other", hidden=48, layers=2)
    folder = write_tiny_adapter(tmp_path / "a", model, targets=("q_proj",))
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn.* would not be used"):
        open_one(folder, other)


def test_routed_experts_are_not_asked_for_and_not_taken(tmp_path) -> None:
    model = cases()["qwen3_moe"].write(tmp_path / "moe")
    folder = write_tiny_adapter(tmp_path / "a", model, targets=ATTENTION)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    write_adapter(folder, config | {"target_modules": [*ATTENTION, "gate_proj"]}, tensors)
    assert set(open_one(folder, model).ranks) == {f"self_attn.{name}" for name in ATTENTION}
    put(f"{PREFIX}model.layers.0.mlp.experts.1.gate_proj.lora_A.weight", 4, 64)(tensors)
    write_adapter(folder, config, tensors)
    with pytest.raises(CheckpointError, match="routed experts are not adapted"):
        open_one(folder, model)


def test_a_pickle_is_refused_with_what_to_do(model, tmp_path) -> None:
    folder = write_tiny_adapter(tmp_path / "a", model)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is missing; download"):
        open_one(folder, model)
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"only adapter_model\.bin .* safe_serialization=T"):
        open_one(folder, model)


def test_what_is_no_adapter_is_refused(model, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty: adapter_config\.json is missing"):
        open_one(tmp_path / "empty", model)
    write_json(tmp_path / "empty" / "adapter_config.json", {"r": 8})
    with pytest.raises(CheckpointError, match="peft_type is None"):
        open_one(tmp_path / "empty", model)
    (tmp_path / "empty" / "adapter_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        open_one(tmp_path / "empty", model)
    for path in (str(tmp_path / "nothing"), "hf://somebody/adapter"):
        with pytest.raises(ConfigError, match=r"adapters\.it: .* is not a folder on this machine"):
            open_adapters({"it": path}, open_checkpoint(model).config)


def test_links_and_headers_are_bounded_as_those_of_models(model, tmp_path) -> None:
    folder = write_tiny_adapter(tmp_path / "a", model)
    weights = folder / "adapter_model.safetensors"
    outside = tmp_path / "outside.safetensors"
    weights.rename(outside)
    weights.symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"is a link to .*, outside the model folder"):
        open_one(folder, model)
    weights.unlink()
    weights.write_bytes(outside.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="the file is cut short"):
        open_one(folder, model)


def test_the_digest_is_of_every_byte(model, tmp_path) -> None:
    folder = write_tiny_adapter(tmp_path / "a", model)
    before = open_one(folder, model).digest
    assert open_one(folder, model).digest == before
    weights = folder / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    changed = open_one(folder, model).digest
    write_json(
        folder / "adapter_config.json", adapter_config(target_modules=list(ALL), r=4, x=None)
    )
    assert len({before, changed, open_one(folder, model).digest}) == 3
