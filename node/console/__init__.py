"""What a person at a terminal sees: progress, errors, results."""
