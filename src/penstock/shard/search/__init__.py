"""Choose a layout for every decision of a step, and predict the cost of the choice.

One mesh axis at a time is solved exactly (`bucket_elimination.py`); `solver.py` raises the price of memory until the plan fits.
"""
