"""The quarantine reasons: every `kind` that may be written to `quarantine.jsonl`, and what it means to the user."""

QUARANTINE_REASONS = {
    # the entry
    "malformed": "not JSON, or not in a layout that mmtrain reads: turns, roles, texts, parts, media",
    "tools": "tools or calls of tools that cannot be read, or that the chat format has no place for",
    "chat_template": "the chat template rejects the conversation, or does not show which part of it is an answer",
    "no_answer": "no assistant turn with text to learn from",
    "image_count": "the user turns hold more or fewer `<image>` marks than the sample has images",
    "audio_count": "the user turns hold more or fewer `<audio>` marks than the sample has clips",
    "video_count": "the user turns hold more or fewer `<video>` marks than the sample has videos",
    "too_many_images": "more images, frames of videos included, than `data.max_images`",
    "too_long": "more LLM tokens than `data.max_sample_tokens` or `data.seq_len`",
    "no_vision": "it has images or videos, but the recipe's model has no vision encoder",
    "no_audio": "it has clips, but the recipe's model has no audio encoder",
    # the location of its media
    "image_path": "the path of an image leads outside of the source's `image_root`, perhaps by a symbolic link",
    "audio_path": "the path of a clip leads outside of the source's `image_root`, perhaps by a symbolic link",
    "video_path": "the path of a video leads outside of the source's `image_root`, perhaps by a symbolic link",
    "image_url": "a URL (`https:`, `file:`, ...) instead of a path, or a data URL of something else",
    "audio_url": "a URL instead of a path, a data URL of something else, or the clip itself in another way",
    "video_url": "a URL instead of a path, a data URL of something else, or the video itself in another way",
    "missing_image": "the image does not exist: no such file, no such member, or an empty cell",
    "missing_audio": "the clip does not exist: no such file, no such member, or an empty cell",
    "missing_video": "the video does not exist: no such file, no such member, or an empty cell",
    # its media
    "not_an_image": "not an image, or not in a format that mmtrain reads",
    "not_audio": "not a sound file, or not in a format that mmtrain reads",
    "not_a_video": "not a video, or not in a container that mmtrain reads (playlists are not followed)",
    "empty_audio": "a clip without audio samples",
    "empty_video": "a video without a duration",
    "too_many_pixels": "an image or video of more pixels than `data.image.max_source_pixels`; it was not decoded",
    "clip_too_long": "a clip longer than `data.audio.max_seconds`, unless `data.audio.long_clips` is `cut`",
    "clip_too_short": "a clip too short to become one LLM token",
    "audio_too_wide": "a clip of more than 32 channels or a sample rate above 384 kHz",
    "truncated": "the end of an image, clip or video is missing",
    "undecodable": "the header is valid, but the rest cannot be decoded",
    "deadly": "reading its media twice crashed a worker process or blocked it for a minute",
    # tar shards
    "tar_member": "a member that is not a plain file: a link, a device, a pipe, a sparse file",
    "tar_name": "a member whose name is absolute, contains `..` or holds control characters",
    "tar_member_size": "a member larger than `data.limits.max_member_bytes`, or a text larger than 64 MiB",
    "tar_too_many": "the rest of a shard with more than `data.limits.max_members` members",
    "tar_broken": "the rest of a shard with a broken structure: truncated, damaged, compressed, or two archives in one",
    # Parquet files
    "parquet_cell_size": "a cell larger than `data.limits.max_member_bytes`",
    "parquet_too_many": "the rest of a file with more than `data.limits.max_members` rows",
    "parquet_broken": "the rest of a row group that cannot be decoded",
}
