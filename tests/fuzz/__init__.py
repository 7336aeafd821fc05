"""Random distributed programs on real GPUs, or on the CPU device: `python -m tests.fuzz --help`."""
