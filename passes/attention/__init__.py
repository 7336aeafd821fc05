"""The passes that turn a collective and the attention beside it into one Task node, and the proofs of masks."""
