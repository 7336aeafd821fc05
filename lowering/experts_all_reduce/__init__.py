"""experts_all_reduce: out = all_reduce(the weighted sum of what its experts return for each token)."""
