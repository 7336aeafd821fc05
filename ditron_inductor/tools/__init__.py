"""The commands beside tuning and the tax report: demo and doctor, and the processes that they start."""
