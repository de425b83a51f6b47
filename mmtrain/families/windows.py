"""Read which blocks of a decoder attend inside a sliding window from its config."""

from collections.abc import Callable

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings

_FULL, _SLIDING = "full_attention", "sliding_attention"  # what `layer_types` says of a block


def window_settings(
    config: ConfigSection, num_blocks: int, window: int | None, is_full: Callable[[int], bool]
) -> Settings:
    """Return the settings of sliding windows; `is_full` says which blocks have none if `layer_types` is missing."""
    kinds = config.value("layer_types")
    if kinds is None:
        kinds = [_FULL if window is None or is_full(block) else _SLIDING for block in range(num_blocks)]
    is_list = isinstance(kinds, list) and len(kinds) == num_blocks
    if not is_list or not all(kind in (_FULL, _SLIDING) for kind in kinds):
        config.reject("layer_types", f"found {kinds}, allowed: {_FULL} or {_SLIDING} for each of {num_blocks} layers")
        return {"window": None, "full_attention_blocks": ()}
    full = tuple(block for block, kind in enumerate(kinds) if kind == _FULL)
    if len(full) == num_blocks:
        return {"window": None, "full_attention_blocks": ()}
    if window is None:
        config.reject("layer_types", f"found {_SLIDING}, but the config has no sliding window")
    return {"window": window, "full_attention_blocks": full}


def qwen_window_settings(config: ConfigSection, num_blocks: int) -> Settings:
    """Read the window of Qwen2 and Qwen3: only with `use_sliding_window`, in blocks from `max_window_layers` on."""
    is_used = config.flag("use_sliding_window", False)
    stated = config.optional_integer("sliding_window", 4096)
    first = config.value("max_window_layers")
    first_windowed = 28 if first is None else first
    if type(first_windowed) is not int or first_windowed < 0:
        config.reject("max_window_layers", f"found {first}, allowed: a whole number of at least 0")
        first_windowed = 0
    return window_settings(config, num_blocks, stated if is_used else None, lambda block: block < first_windowed)


def reject_sliding_windows(config: ConfigSection) -> None:
    """Reject windows. Without `use_sliding_window` the other keys of a window have no effect."""
    config.require("use_sliding_window", False, default=False)
    config.value("sliding_window")
    config.value("max_window_layers")
    kinds = config.value("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != _FULL for kind in kinds)):
        config.reject("layer_types", f"{kinds} are not supported yet; supported: {_FULL}")


def layer_types(num_blocks: int, full_attention_blocks: tuple[int, ...]) -> list[str]:
    """Return what a config says of each block: the way back from `window_settings`."""
    return [_FULL if block in full_attention_blocks else _SLIDING for block in range(num_blocks)]
