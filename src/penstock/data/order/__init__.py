"""A seed and a step go in, record indices come out: permutations, weights, mixtures, batches, and the rows of a process."""
