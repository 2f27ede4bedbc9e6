"""A host in a run: its block, budget, folder, display; several workers of one host."""
