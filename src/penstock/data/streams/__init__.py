"""Read records without a length or random access as batches whose position can be saved.

`stream.stream` is the entry point; `jsonl` and `webdataset` read files, and `records.IterableRecords` any iterable.
"""
