"""matmul_all_reduce_rms_norm: out = norm(all_reduce(a @ b) + residual), and the sum. Each strategy has a module."""
