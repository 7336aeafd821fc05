"""Training and serving stacks that call `torch.compile` themselves. Each is skipped where it is not installed."""
