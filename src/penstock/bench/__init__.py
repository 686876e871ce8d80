"""Is it true? Benchmarks whose every variant runs in processes of its own and is checked before it is timed."""
