"""Choose a layout for every decision of a step, and predict the cost of the choice.

`descent.py` finds fast plans, `exact.py` the best within the memory limit, with a proof, and `solver.py` chooses among them.
"""
