"""projections: several matmuls of one tensor with few rows."""
