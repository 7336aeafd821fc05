"""Measuring strategies at a user's own shapes, and the table that keeps what was measured."""
