"""From a stage graph to a program: orders of compute, and the communication that they need.

Start with `assemble.build`; `builder` writes compute, `lower` adds communication.
"""
