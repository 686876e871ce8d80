"""The mesh room: hardware figures, candidate mesh shapes, and the collectives that reshard an array over a mesh, with prices."""
