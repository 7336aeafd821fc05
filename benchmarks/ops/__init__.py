"""The fused ops against the libraries: `python -m benchmarks.ops --help`."""
