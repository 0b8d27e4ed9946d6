"""Which layers of a model attend through a sliding window, as its `config.json` declares it."""

from jaxpaged.errors import CheckpointError
from jaxpaged.model.config_families import Family
from jaxpaged.model.config_fields import Fields
from jaxpaged.model.shown import shown

Windows = tuple[int | None, ...]

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_windows(
    fields: Fields, family: Family, num_layers: int, rotary_layers: tuple[bool, ...]
) -> Windows:
    """The window of every layer: the keys that a query sees, its own included, or None for all.

    `layer_types` says which layers have the window of `sliding_window`. Without it the family has
    a rule; a Llama would ignore the window, so it is refused.

    Args:
        fields: The whole `config.json`.
        family: Whose it is.
        num_layers: Layers of the model.
        rotary_layers: Of every layer, whether it rotates; empty where all do.

    Raises:
        CheckpointError: A key is malformed, or two do not go together.
    """
    if not fields.flag("use_sliding_window", default=True):
        return (None,) * num_layers
    declared = fields.values.get("sliding_window") is not None
    window = fields.size("sliding_window") if declared else None
    if fields.values.get("layer_types") is not None:
        return _by_layer_types(fields, num_layers, window)
    if window is None:
        return (None,) * num_layers
    has_window = _by_rule(fields, family, num_layers, rotary_layers, window)
    return tuple(window if has else None for has in has_window)


def _by_rule(
    fields: Fields,
    family: Family,
    num_layers: int,
    rotary_layers: tuple[bool, ...],
    window: int,
) -> list[bool]:
    """Of every layer, whether it has the window where nothing says so."""
    layers = range(num_layers)
    if family.windows == "all":
        return [True for _ in layers]
    if family.windows == "upper":
        first = fields.count("max_window_layers")
        return [layer >= first for layer in layers]
    if family.windows == "pattern":
        period = fields.size("sliding_window_pattern")
        return [(layer + 1) % period != 0 for layer in layers]
    if family.windows == "without_rope":
        return [not rotates for rotates in rotary_layers]
    raise CheckpointError(
        f"{fields.where}: sliding_window is {window}, which is not supported in a "
        f"{fields.values.get('model_type')} without layer_types; if the model was trained with a "
        "window, say which layers have it in layer_types, otherwise set sliding_window to null"
    )


def _by_layer_types(fields: Fields, num_layers: int, window: int | None) -> Windows:
    kinds = fields.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        found = f"{len(kinds)} entries" if isinstance(kinds, list) else repr(kinds)
        raise CheckpointError(
            f"{fields.where}: layer_types is {found}; expected a list with one entry for each of "
            f"{num_layers} layers"
        )
    for layer, kind in enumerate(kinds):
        if kind not in (_FULL, _SLIDING):
            raise CheckpointError(
                f"{fields.where}: layer_types is {shown(kind)} at layer {layer}, which is not "
                f"supported; supported are {_FULL!r} and {_SLIDING!r}"
            )
    if _SLIDING in kinds and window is None:
        raise CheckpointError(
            f"{fields.where}: layer_types has {_SLIDING!r}, but sliding_window is missing"
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)
