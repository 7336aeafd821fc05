"""grouped_matmul_reduce_scatter: the reduce-scatter of what the experts of a mixture return, by strategy."""
