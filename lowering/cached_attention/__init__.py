"""The kernels of `cached_attention`."""
