"""Images, sound and video: sizes from headers alone, and pixels or frames when a step needs them.

Start with `media_bytes`, which says where the bytes of an item lie.
"""
