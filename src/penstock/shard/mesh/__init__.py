"""The devices and their links: hardware figures, candidate mesh shapes, and the price of resharding over a mesh."""
