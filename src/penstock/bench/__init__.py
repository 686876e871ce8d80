"""Benchmark libraries against each other: every run has a fresh process, and results are checked before they are timed.

This package is the tool: it takes workloads and writes a report. `suites` holds penstock's own workloads, written as a user
would write theirs.
"""
