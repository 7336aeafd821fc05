"""grouped_matmul_all_reduce: the reduction of what the experts of a mixture return. Each strategy has a module."""
