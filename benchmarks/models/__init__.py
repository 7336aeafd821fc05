"""Whole models: layers of real shapes with random weights, through Ditron and through what there is without it."""
