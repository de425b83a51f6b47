"""The program format: the stage graph, actions, the loads of a step, and their text form.

Read `actions` first, then `graph` and `program`. `data_dependencies` says which data an action reads and writes and
between which ranks it travels; `segments` how passes run in parts; `symmetry` how replica groups mirror group 0;
`matching` joins sends with receives and ranks with their collectives.
"""
