"""The decoders that families with media put behind their encoders, chosen by the `model_type` of their config."""

from collections.abc import Callable, Mapping

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings
from mmtrain.families.llama import llama_settings
from mmtrain.families.mistral import mistral_settings
from mmtrain.families.qwen2 import qwen2_settings
from mmtrain.families.qwen3 import qwen3_settings

_DECODERS: Mapping[str, Callable[[ConfigSection], Settings]] = {
    "llama": llama_settings,
    "mistral": mistral_settings,
    "qwen2": qwen2_settings,
    "qwen3": qwen3_settings,
}


def text_settings(text: ConfigSection, default: str) -> Settings:
    """Return the settings of the LLM in a `text_config`; `default` is its `model_type` if it states none."""
    kind = text.value("model_type") or default
    if not isinstance(kind, str) or kind not in _DECODERS:
        text.reject("model_type", f"{kind!r} is not supported yet; supported: {', '.join(_DECODERS)}")
        kind = default
    return _DECODERS[kind](text)
