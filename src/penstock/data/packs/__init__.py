"""Pack documents of different lengths into records of one length: choose the pieces of each pack, save this index, read by it."""
