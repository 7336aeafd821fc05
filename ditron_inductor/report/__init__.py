"""Reports for users of what was done: explain, the records behind it, and the summary."""
