"""Files in stores such as S3, Google Cloud Storage, the Hugging Face Hub and HTTP servers, read through a local cache.

URLs go in, and local paths of complete files come out. fsspec reads the stores; the cache is `cache.Cache`.
"""
