"""The kernels of `choose_experts`."""
