"""Documents of different lengths go in, records of one length come out: which pieces share a pack, its file, and reading it."""
