"""Benchmarks: every variant runs in processes of its own and is checked before it is timed.

This package is the tool: it takes workloads and returns a report. `suites` holds workloads that use it as a user's own would.
"""
