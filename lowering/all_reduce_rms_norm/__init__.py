"""all_reduce_rms_norm: out = norm(all_reduce(x) + residual), and the sum. Each kernel has a module."""
