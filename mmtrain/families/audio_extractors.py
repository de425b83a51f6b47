"""Read how a folder's feature extractor prepares clips, as settings of `data.audio`."""

from pathlib import Path

from mmtrain.errors import ModelFolderError
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings
from mmtrain.families.processor_files import AUDIO_KEYS, read_processor

_SAMPLE_RATE_HZ = 16_000
# Keys that follow from others, or that say how a batch of clips is padded.
_WITHOUT_EFFECT = (
    "feature_extractor_type", "processor_class", "n_samples", "nb_max_frames", "padding",
    "return_attention_mask", "return_tensors",
)  # fmt: skip


def read_audio_settings(folder: Path, mel_bins: int) -> Settings | None:
    """Return the settings of `data.audio` under which frames are those of the folder's feature extractor.

    mel_bins: of the encoder.

    None for a folder that states none. Raises ModelFolderError, which names what is not supported.
    """
    stated = read_processor(folder, "audio")
    if stated is None:
        return None
    kind = stated.config.get("feature_extractor_type", "WhisperFeatureExtractor")  # the only one of these families
    if kind != "WhisperFeatureExtractor":
        raise ModelFolderError(
            f"{stated.where}: feature_extractor_type {kind!r} is not supported yet; supported: "
            "WhisperFeatureExtractor. data.audio.scheme in the recipe chooses another way to prepare clips"
        )
    of_clips = (*AUDIO_KEYS, *_WITHOUT_EFFECT, "do_normalize", "mel_filters")
    is_joint = "image_processor_type" in stated.config
    section = ConfigSection({key: stated.config[key] for key in stated.config if not is_joint or key in of_clips})
    for key in _WITHOUT_EFFECT:
        section.value(key)
    section.require("feature_size", mel_bins, default=80)
    section.require("sampling_rate", _SAMPLE_RATE_HZ, default=_SAMPLE_RATE_HZ)
    section.require("hop_length", 160, default=160)
    section.require("n_fft", 400, default=400)
    section.require("padding_value", 0, 0.0, default=0.0)
    section.require("dither", 0, 0.0, default=0.0)
    section.require("do_normalize", False, None, default=False)
    section.require("padding_side", "right", default="right")
    settings = {"scheme": "dynamic", "max_seconds": section.number("chunk_length", 30), "long_clips": "cut"}
    section.value("mel_filters")  # some folders store the filters, which follow from the sizes above
    section.finish()
    if section.problems:
        raise ModelFolderError(f"{stated.where} ({kind}): " + "; ".join(section.problems))
    return settings
