"""Why samples are set aside: every kind that stands in `quarantine.jsonl`, and what it means."""

QUARANTINE_REASONS = {
    # the entry
    "malformed": "not JSON, or not in a layout that is read: turns, roles, texts, parts, media",
    "tools": "it describes or calls tools beside its texts (`tools`, `functions`, `tool_calls`, `function_call`)",
    "no_answer": "no assistant's turn with text to learn from",
    "image_count": "`<image>` does not stand in its user turns as often as it has images",
    "audio_count": "`<audio>` does not stand in its user turns as often as it has clips",
    "video_count": "`<video>` does not stand in its user turns as often as it has videos",
    "too_many_images": "more images and frames of videos than `data.max_images`",
    "too_long": "more LLM tokens than `data.max_sample_tokens` or `data.seq_len`",
    "no_vision": "it has images or videos, the recipe's model has no vision unit",
    "no_audio": "it has clips, the recipe's model has no audio unit",
    # where its media are
    "image_path": "an image's path leads out of the source's `image_root`, perhaps by a symbolic link",
    "audio_path": "a clip's path leads out of the source's `image_root`, perhaps by a symbolic link",
    "video_path": "a video's path leads out of the source's `image_root`, perhaps by a symbolic link",
    "image_url": "a URL (`https:`, `file:`, `data:`, ...), or the image itself, in place of a path",
    "audio_url": "a URL, or the clip itself, in place of a path",
    "video_url": "a URL, or the video itself, in place of a path",
    "missing_image": "no such image: no file, no member, an empty cell",
    "missing_audio": "no such clip: no file, no member, an empty cell",
    "missing_video": "no such video: no file, no member, an empty cell",
    # its media
    "not_an_image": "no image, or of a format that is not read",
    "not_audio": "no sound, or of a format that is not read",
    "not_a_video": "no video, or of a container that is not read (playlists are not followed)",
    "empty_audio": "a clip without samples",
    "empty_video": "a video without a duration",
    "too_many_pixels": "an image or video above `data.image.max_source_pixels`, seen before decoding",
    "clip_too_long": "a clip above `data.audio.max_seconds`",
    "audio_too_wide": "a clip of more channels or a higher rate than anybody hears",
    "truncated": "the end of an image, clip or video is missing",
    "undecodable": "the header is fine, what follows is not",
    "deadly": "reading it has twice ended a worker process, or kept it for a minute",
    # tar shards
    "tar_member": "a member that is no plain file: a link, a device, a pipe, a sparse file",
    "tar_name": "a member whose name is absolute, leads upwards or holds control characters",
    "tar_member_size": "a member above `data.limits.max_member_bytes`, or a text above 64 MiB",
    "tar_too_many": "the rest of a shard of more than `data.limits.max_members` members",
    "tar_broken": "the rest of a shard that cannot be followed: cut, damaged, compressed, two in one",
    # Parquet files
    "parquet_cell_size": "a cell above `data.limits.max_member_bytes`",
    "parquet_too_many": "the rest of a file of more than `data.limits.max_members` rows",
    "parquet_broken": "the rest of a row group that cannot be decoded",
}
