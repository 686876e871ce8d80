"""Turn the decisions of the search into layouts that JAX takes.

In: an assignment. Out: partition specs of the arguments and results, and sharding constraints inside of the step.
"""
