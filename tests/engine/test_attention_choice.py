"""Who computes attention, by device, model and settings, and what is refused."""

import dataclasses

import jax
import pytest

from jaxpaged import EngineConfig
from jaxpaged.engine import attention
from jaxpaged.engine.device import Device
from jaxpaged.errors import ConfigError
from jaxpaged.model.config import ModelConfig

CPU = Device(platform="cpu", name="cpu")


def device(platform: str, capability: str | None) -> Device:
    """The capability of what is not NVIDIA's is its name."""
    try:
        return Device(platform=platform, name="a GPU", capability=float(capability or ""))
    except ValueError:
        return Device(platform=platform, name=capability or platform)


LLAMA = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    },
    "config.json",
)


@pytest.mark.parametrize(
    ("platform", "capability", "asked", "found", "why"),
    [
        ("cpu", None, "auto", "llvm", "compiled for this CPU"),
        ("cpu", None, "llvm", "llvm", "compiled for this CPU"),
        ("cpu", None, "xla", "xla", "engine.attention says so"),
        ("cpu", None, "triton", "triton_interpreted", "there is no GPU"),
        ("gpu", "9.0", "auto", "triton", "compute capability 9.0"),
        ("gpu", "8.0", "triton", "triton", "compute capability 8.0"),
        ("gpu", "8.9", "xla", "xla", "engine.attention says so"),
        ("gpu", "7.5", "auto", "xla", "compute capability 7.5, the kernels need 8.0"),
        ("tpu", None, "auto", "xla", "the device is a tpu"),
        ("gpu", "gfx90a", "auto", "xla", "the device is a gpu, gfx90a, the kernels need 8.0"),
    ],
)
def test_who_computes_attention(platform, capability, asked, found, why) -> None:
    place = device(platform, capability)
    implementation, reason = attention.choose(EngineConfig(attention=asked), device=place)
    assert implementation == found
    assert why in reason


@pytest.mark.parametrize(
    ("settings", "head_dim", "why"),
    [
        ({"dtype": "bfloat16"}, 64, "not made for bfloat16 weights with a bfloat16 pool"),
        ({"kv_dtype": "int8"}, 64, "not made for float32 weights with a int8 pool"),
        ({}, 24, "heads are 24 wide, the kernels for CPUs need a multiple of 16"),
    ],
)
def test_what_the_kernels_for_cpus_do_not_serve_takes_xla_or_is_refused(
    settings, head_dim: int, why: str
) -> None:
    model = dataclasses.replace(LLAMA, head_dim=head_dim)
    implementation, reason = attention.choose(EngineConfig(**settings), model, device=CPU)
    assert implementation == "xla"
    assert why in reason
    with pytest.raises(
        ConfigError, match=f"engine.attention is llvm, and .*{why}; use auto or xla"
    ):
        attention.choose(EngineConfig(attention="llvm", **settings), model, device=CPU)


def test_without_numba_a_cpu_takes_xla_and_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(attention.llvm.importlib.util, "find_spec", lambda _: None)
    implementation, reason = attention.choose(EngineConfig(), device=CPU)
    assert implementation == "xla"
    assert reason == "numba is not installed: pip install 'jaxpaged[cpu]'"


def test_the_kernels_for_cpus_are_refused_on_a_gpu() -> None:
    place = device("gpu", "9.0")
    with pytest.raises(ConfigError, match="these kernels are for CPUs, the device is a gpu"):
        attention.choose(EngineConfig(attention="llvm"), device=place)


@pytest.mark.parametrize(
    ("platform", "capability", "why"),
    [
        ("gpu", "7.5", "compute capability 7.5, the kernels need 8.0; use auto or xla"),
        ("tpu", None, "the device is a tpu, the kernels need 8.0"),
    ],
)
def test_kernels_on_a_device_that_cannot_are_refused(platform, capability, why) -> None:
    place = device(platform, capability)
    with pytest.raises(ConfigError, match=rf"engine\.attention is triton, and {why}"):
        attention.choose(EngineConfig(attention="triton"), device=place)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "found"),
    [
        ("float32", None, "triton"),
        ("float32", "int8", "xla"),
        ("float32", "bfloat16", "xla"),
        ("bfloat16", "float32", "xla"),
        ("bfloat16", "int8", "triton"),
        (None, "float32", "xla"),
        (None, "fp8", "triton"),
    ],
)
def test_formats_that_the_kernels_were_not_compiled_for_take_xla(dtype, kv_dtype, found) -> None:
    place = device("gpu", "8.0")
    config = EngineConfig(dtype=dtype, kv_dtype=kv_dtype)
    assert attention.choose(config, LLAMA, device=place).implementation == found
    asked = dataclasses.replace(config, attention="triton")
    if found == "xla":
        with pytest.raises(ConfigError, match=r"weights with a .* pool; use auto or xla"):
            attention.choose(asked, LLAMA, device=place)
    else:
        assert attention.choose(asked, LLAMA, device=place).implementation == "triton"


def test_heads_too_wide_for_the_kernels_take_xla_or_are_refused() -> None:
    place = device("gpu", "9.0")
    wide = dataclasses.replace(LLAMA, head_dim=320)
    choice = attention.choose(EngineConfig(), wide, device=place)
    assert choice == ("xla", "heads are 320 wide, the kernels serve 256")
    with pytest.raises(ConfigError, match="is triton, and heads are 320 wide"):
        attention.choose(EngineConfig(attention="triton"), wide, device=place)


@pytest.mark.parametrize(
    ("platform", "capability", "why"),
    [
        ("cpu", None, "the device is a cpu, the kernel is for 9.0"),
        ("gpu", "8.9", "compute capability 8.9, the kernel is for 9.0"),
        ("gpu", "10.0", "compute capability 10.0, the kernel is for 9.0"),
    ],
)
def test_mosaic_elsewhere_than_on_hopper_is_refused(platform, capability, why) -> None:
    place = device(platform, capability)
    with pytest.raises(ConfigError, match=f"engine.attention is mosaic, and {why}.*; use auto"):
        attention.choose(EngineConfig(attention="mosaic"), LLAMA, device=place)


if jax.__version_info__ < (0, 12):

    def test_mosaic_on_an_older_jax_says_what_it_needs() -> None:
        place = device("gpu", "9.0")
        with pytest.raises(ConfigError, match=r"mosaic, and .*need JAX 0\.12.*; use auto"):
            attention.choose(EngineConfig(attention="mosaic"), LLAMA, device=place)

else:

    def test_mosaic_on_hopper_says_who_does_prefill() -> None:
        place = device("gpu", "9.0")
        choice = attention.choose(EngineConfig(attention="mosaic"), LLAMA, device=place)
        assert choice == ("mosaic", "engine.attention says so; prefill by the Triton kernels")

    @pytest.mark.parametrize(
        ("settings", "changes", "why"),
        [
            ({"kv_dtype": "int8"}, {}, r"bfloat16 only, not \('bfloat16', 'int8'\)"),
            ({"dtype": "float32"}, {}, r"bfloat16 only, not \('float32', 'float32'\)"),
            ({"block_size": 8}, {}, r"block sizes \(16, 32, 64\), not 8"),
            ({}, {"head_dim": 96}, r"head widths \(64, 128\), not 96"),
            ({}, {"num_heads": 33, "num_kv_heads": 1}, "up to 32 query heads .* 33 to 1"),
        ],
    )
    def test_what_mosaic_does_not_serve_is_refused(settings, changes, why) -> None:
        place = device("gpu", "9.0")
        with pytest.raises(ConfigError, match=f"engine.attention is mosaic, and .*{why}; use auto"):
            attention.choose(
                EngineConfig(attention="mosaic", **settings),
                dataclasses.replace(LLAMA, **changes),
                device=place,
            )
