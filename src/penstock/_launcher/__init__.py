"""Settings with which a training is started: environment variables of the C library's allocator and of XLA."""
