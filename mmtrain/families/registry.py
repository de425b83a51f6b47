"""The families that can be trained from a folder. To add one, see CONTRIBUTING.md."""

from mmtrain.families.encoders import CLIP, SIGLIP, WHISPER
from mmtrain.families.family import Family
from mmtrain.families.gemma3 import GEMMA3
from mmtrain.families.gemma3_text import GEMMA3_TEXT
from mmtrain.families.generators import PIXART, UNET, VAE
from mmtrain.families.internvl import INTERNVL
from mmtrain.families.llava import LLAVA
from mmtrain.families.llava_next import LLAVA_NEXT
from mmtrain.families.llava_onevision import LLAVA_ONEVISION
from mmtrain.families.qwen2_5_omni import QWEN2_5_OMNI
from mmtrain.families.qwen2_5_vl import QWEN2_5_VL
from mmtrain.families.qwen2_audio import QWEN2_AUDIO
from mmtrain.families.qwen2_vl import QWEN2_VL
from mmtrain.families.qwen3_vl import QWEN3_VL
from mmtrain.families.text_decoders import LLAMA, MISTRAL, QWEN2, QWEN3

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        GEMMA3,
        GEMMA3_TEXT,
        INTERNVL,
        LLAMA,
        LLAVA,
        LLAVA_NEXT,
        LLAVA_ONEVISION,
        MISTRAL,
        QWEN2,
        QWEN2_AUDIO,
        QWEN2_VL,
        QWEN2_5_OMNI,
        QWEN2_5_VL,
        QWEN3,
        QWEN3_VL,
    )
}
# Their folders hold no LLM: a recipe names them for one of its units.
ENCODER_FAMILIES: dict[str, Family] = {family.name: family for family in (CLIP, SIGLIP, WHISPER)}
# Parts of pipelines of `diffusers`, for the generator of a recipe.
GENERATOR_FAMILIES: dict[str, Family] = {family.name: family for family in (PIXART, UNET, VAE)}
