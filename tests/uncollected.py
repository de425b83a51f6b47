"""Import this first for imports that collect no garbage: of torch and Megatron-core they take a quarter less."""

import gc

gc.disable()
