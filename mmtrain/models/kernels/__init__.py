"""The hot operations of a block between its large GEMMs, each in one place.

Each operation has a form in torch, which runs anywhere and defines what it computes. Autograd would start a kernel, and
keep a tensor, for each step of the formula; these forms have their own backward, which needs fewer of both. On CUDA
some have a fused form too, one kernel each way: `liger`. `choice` says which form a run uses, and why.
"""
