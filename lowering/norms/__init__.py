"""What kernels of several node kinds use to normalise rows."""
