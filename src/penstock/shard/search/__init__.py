"""Choose a layout for every decision of a step, and predict the cost of the choice.

`exact.py` finds the best within the memory limit on a mesh, with a proof, and `solver.py` chooses among meshes and baselines.
"""
