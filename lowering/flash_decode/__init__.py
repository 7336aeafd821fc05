"""flash_decode: decode attention over a KV cache that is sharded along the sequence. One module for each strategy."""
