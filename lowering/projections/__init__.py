"""projections: several matmuls of one tensor that has few rows."""
