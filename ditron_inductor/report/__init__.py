"""The report of `explain`: what it holds, its text for a terminal, its page with pictures, and the timing of strategies."""
