"""A collective and the attention beside it become one Task node; the proofs of what a mask shows."""
