"""Guests: models that no family of ours covers, with modules that `transformers` builds.

The only room that imports `transformers`, and `models.guest_factory` alone imports the room. Read `open_guest` first.
"""

from mmtrain.guests.open_guest import GuestModules, GuestNames, build_guest, guest_names
from mmtrain.guests.packed_attention import PACKED_ATTENTION, attending

__all__ = ["PACKED_ATTENTION", "GuestModules", "GuestNames", "attending", "build_guest", "guest_names"]
