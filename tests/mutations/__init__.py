"""Faults put into the sources on purpose, each of which a test of the default suite has to notice: see `__main__`."""
