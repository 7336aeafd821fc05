"""The commands demo and doctor, and the processes that commands start."""
