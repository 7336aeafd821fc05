"""The passes of this folder give each collective, and the ops around it, one spelling."""
