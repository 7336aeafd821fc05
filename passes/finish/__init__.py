"""What a graph with Task nodes needs last: names, order, padding, facts for the peers, verification."""
