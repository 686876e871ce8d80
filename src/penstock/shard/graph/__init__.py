"""Build the decision graph of a step, with its axis groups, folded layers, live ranges and roles."""
