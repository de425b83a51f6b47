"""From data files to what each rank computes on: reading, quarantine, tokens, patches, order, prefetch. No torch."""

from mmtrain.data.formats.chat_tokenizer import ChatTokenizer, Encoded
from mmtrain.data.formats.sample import Quarantined, Sample, Turn, read_quarantine, write_quarantine
from mmtrain.data.index.data_index import DataIndex, build
from mmtrain.data.loading.batch_builder import BadSamples, Need, Preparer, StepData
from mmtrain.data.loading.loader import Loader
from mmtrain.data.loading.payload import AudioPayload, TextPayload, VisionPayload
from mmtrain.data.stream.group_stream import GroupStream, validation_batches

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
