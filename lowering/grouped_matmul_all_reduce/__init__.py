"""grouped_matmul_all_reduce: the all-reduce of what the experts of a mixture return. Each strategy has a module."""
