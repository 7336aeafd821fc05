"""The test suite: cheapest first (passes, task, device, lowering, models); see `tests/ranks.py` for multi-process tests."""
