"""The last passes on a graph with Task nodes: names, order, padding, facts for the peers, verification."""
