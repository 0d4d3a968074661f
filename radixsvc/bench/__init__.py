"""Benchmarks: `radixsvc bench NAME`."""
