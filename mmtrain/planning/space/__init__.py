"""What is searched: the problem, what the recipe allows, a candidate plan, and the effort that a search may take.

Start with `problem.PlanningProblem`; `candidate` holds what every search hands on.
"""
