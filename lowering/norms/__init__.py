"""The normalisation of rows, which kernels of several node kinds use."""
