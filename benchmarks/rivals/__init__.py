"""What an expert would set up in place of a compiler's collectives, as contestants of both benchmarks."""
