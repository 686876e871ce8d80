"""Compute the record indices of a step from a seed: permutations, weights, mixtures, batches, and the rows of a process."""
