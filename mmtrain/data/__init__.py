"""From data files to what each rank computes on: reading, quarantine, tokens, patches, order, prefetch. No torch."""

from mmtrain.data.formats.sample import Quarantined, Sample, Turn, read_quarantine, write_quarantine
from mmtrain.data.index.data_index import DataIndex, build_index
from mmtrain.data.loading.batch_builder import BadSampleTracker, BatchBuilder, PayloadNeed, StepData
from mmtrain.data.loading.loader import Loader
from mmtrain.data.loading.payload import AudioPayload, TextPayload, VisionPayload
from mmtrain.data.stream.group_stream import GroupStream, validation_batches
from mmtrain.data.text.chat_tokenizer import ChatTokenizer, EncodedSample

__all__ = [
    "AudioPayload",
    "BadSampleTracker",
    "BatchBuilder",
    "ChatTokenizer",
    "DataIndex",
    "EncodedSample",
    "GroupStream",
    "Loader",
    "PayloadNeed",
    "Quarantined",
    "Sample",
    "StepData",
    "TextPayload",
    "Turn",
    "VisionPayload",
    "build_index",
    "read_quarantine",
    "validation_batches",
    "write_quarantine",
]
