"""The simulator: when every action of a program runs, given what actions cost.

Read `simulate.simulate` first. `timing` says what actions cost. `rank_equivalence` finds ranks that do the same;
`sim_graph_builder` keeps one of them in a `SimGraph`, which `event_loop` runs. `critical_path` says what bounds a step.
"""
