"""From data files to what each rank computes on: reading, quarantine, tokens, patches, order, prefetch. No torch."""

from mmtrain.data.index import DataIndex, build
from mmtrain.data.loader import Loader
from mmtrain.data.order import GroupStream, validation_batches
from mmtrain.data.payload import AudioPayload, TextPayload, VisionPayload
from mmtrain.data.prepare import BadSamples, Need, Preparer, StepData
from mmtrain.data.sample import Quarantined, Sample, Turn, read_quarantine, write_quarantine
from mmtrain.data.tokenize import ChatTokenizer, Encoded

__all__ = [
    "AudioPayload",
    "BadSamples",
    "ChatTokenizer",
    "DataIndex",
    "Encoded",
    "GroupStream",
    "Loader",
    "Need",
    "Preparer",
    "Quarantined",
    "Sample",
    "StepData",
    "TextPayload",
    "Turn",
    "VisionPayload",
    "build",
    "read_quarantine",
    "validation_batches",
    "write_quarantine",
]
