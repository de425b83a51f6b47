"""Data sets for demos and tests: drawn pictures with questions, and recordings of spoken digits.

`demo` generates the picture questions with `demo_draw`; `digits` turns a folder of recordings into training data.

Read `demo.generate_demo` first.
"""
