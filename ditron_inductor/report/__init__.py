"""What `explain` reports: as data, as text for a terminal, and as a page with pictures; how strategies are timed."""
