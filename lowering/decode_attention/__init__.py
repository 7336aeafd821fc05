"""What the kernels of decode attention have in common: their blocks, splits of a cache, and the attention to one."""
