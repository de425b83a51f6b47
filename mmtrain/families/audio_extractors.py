"""Read how a folder's feature extractor prepares clips, as settings of `data.audio`."""

from pathlib import Path

from mmtrain.errors import ModelFolderError
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings
from mmtrain.families.processor_files import read_processor, without_other_processors

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
    found = read_processor(folder, "feature_extractor", "feature_extractor_type")
    if found is None:
        return None
    path, config = found
    kind = config["feature_extractor_type"]
    if kind != "WhisperFeatureExtractor":
        raise ModelFolderError(
            f"{path}: feature_extractor_type {kind!r} is not supported yet; supported: WhisperFeatureExtractor. "
            "data.audio.scheme in the recipe chooses another way to prepare clips"
        )
    section = ConfigSection(without_other_processors(config, "feature_extractor_type"))
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
        raise ModelFolderError(f"{path} ({kind}): " + "; ".join(section.problems))
    return settings
