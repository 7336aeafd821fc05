"""Core level: the `@triton.jit` primitives that every distributed kernel is made of. Imports nothing of ours."""
