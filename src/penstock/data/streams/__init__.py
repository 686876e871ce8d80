"""Records without a length or random access go in, batches whose position can be saved come out.

`stream.stream` is the entry point; `jsonl` and `webdataset` read files, and `iterables` any iterable with a state of its own.
"""
