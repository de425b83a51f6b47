"""Images, video and audio: their lengths from headers alone, and pixels or log-mel frames when a step needs them.

`media_bytes` says where the bytes of a medium are (a file, a tar member, a Parquet cell) and opens them. `images`,
`video` and `audio` read one kind each, `vision_items` cuts images and videos into items, and `item_readers` offers all
of them to the index and the loader through one interface.

Read `item_readers.ItemReader` first.
"""
