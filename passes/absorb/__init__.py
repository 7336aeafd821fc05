"""Pointwise work and norms beside a Task node become part of it."""
