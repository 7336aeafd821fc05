"""The weighted sums of what the experts of a mixture return, which several node kinds make."""
