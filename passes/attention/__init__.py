"""The passes of this folder turn a collective and the attention beside it into one Task node; the proofs of masks are
here too.
"""
