"""The command that measures strategies at a user's own shapes, and writes the table of these times."""
