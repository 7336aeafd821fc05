"""Kernel tests through the public ops, on the CPU device and on GPUs from one source."""
