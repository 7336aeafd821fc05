"""The matmuls of many tokens with the experts that they take, on rows that are taken where they lie."""
