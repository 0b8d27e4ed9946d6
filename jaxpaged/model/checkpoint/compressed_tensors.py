"""What compressed-tensors says of weights in 8-bit floats; other formats of it are refused."""

from jaxpaged.model.checkpoint.fp8 import Fp8Format
from jaxpaged.model.checkpoint.quantization_fields import QuantizationFields

_KEYS = frozenset(
    {"quant_method", "format", "config_groups", "kv_cache_scheme", "quantization_status"}
    | {"sparsity_config", "transform_config"}
)
_WITHOUT_EFFECT = frozenset({"global_compression_ratio", "ignore", "version"})
# Of a group of modules: which they are shows in the tensors, and activations are not rounded.
_GROUP_WITHOUT_EFFECT = frozenset({"input_activations", "output_activations", "targets"})
_WEIGHT_KEYS = frozenset(
    {"num_bits", "type", "symmetric", "strategy", "dynamic", "block_structure", "group_size"}
    | {"actorder"}
)
_WEIGHT_WITHOUT_EFFECT = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})


def read_compressed_tensors(settings: QuantizationFields) -> Fp8Format:
    """The format of a checkpoint whose weights are 8-bit floats with scales.

    Raises:
        CheckpointError: The settings ask for something else.
    """
    settings.one_of("format", ("float-quantized", "naive-quantized"))
    settings.check_keys(_KEYS, _WITHOUT_EFFECT)
    settings.one_of("quantization_status", (None, "compressed", "frozen"))
    settings.one_of("kv_cache_scheme", (None,))
    settings.one_of("sparsity_config", (None, {}))
    settings.one_of("transform_config", (None, {}))
    blocks = set()
    for group in settings.objects("config_groups"):
        group.one_of("format", (None, "float-quantized", "naive-quantized"))
        group.check_keys(frozenset({"format", "weights"}), _GROUP_WITHOUT_EFFECT)
        weights = group.object("weights")
        weights.check_keys(_WEIGHT_KEYS, _WEIGHT_WITHOUT_EFFECT)
        weights.one_of("type", ("float",))
        weights.one_of("num_bits", (8,))
        weights.one_of("symmetric", (None, True))
        weights.one_of("dynamic", (None, False))
        weights.one_of("group_size", (None,))
        weights.one_of("actorder", (None,))
        strategy = weights.one_of("strategy", ("tensor", "channel", "block"))
        blocks.add(weights.block("block_structure") if strategy == "block" else None)
    if len(blocks) != 1:
        settings.fail("config_groups", "groups that all share scales in the same way")
    return Fp8Format(blocks.pop())
