"""Read files in stores such as S3, Google Cloud Storage, the Hugging Face Hub and HTTP servers through a local cache.

`files` gives local paths of complete files for URLs. fsspec reads the stores; the cache is `cache.Cache`.
"""
