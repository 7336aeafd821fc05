"""What a user can read of what was done: explain, the records behind it, and the summary."""
