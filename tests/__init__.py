"""The test suite, cheapest first: passes, task, device, lowering, models. `tests/ranks.py` runs multi-process tests."""
