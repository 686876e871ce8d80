"""Describe hardware and mesh shapes, and price the collectives that reshard an array over a mesh."""
