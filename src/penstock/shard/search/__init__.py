"""Choose the layouts of a plan.

In: the decision graph of a step, a mesh, the hardware and a memory limit. Out: a layout for every decision, and its predicted
cost. One mesh axis at a time is solved exactly (`bucket_elimination.py`); `solver.py` prices memory until the plan fits.
"""
