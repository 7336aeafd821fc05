"""A collective and the matmuls or the norm beside it become one Task node."""
