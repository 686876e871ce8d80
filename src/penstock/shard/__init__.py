"""What lives where: which device holds which part of a model."""
