"""The program format: stage graph, actions, loads of a step, and their text form.

Start with `actions`, then `program.Program`.
"""
