"""What a pass knows of a graph: proofs, readings and rewriting. No pass is here."""
