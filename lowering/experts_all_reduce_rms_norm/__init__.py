"""experts_all_reduce_rms_norm: out = norm(experts_all_reduce + residual), and the sum."""
