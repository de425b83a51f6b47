"""The endless stream of groups: which samples train together, and when.

Start with `group_stream.GroupStream`.
"""
