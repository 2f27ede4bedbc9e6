"""A block's consensus log: fetched, followed, held in memory, caught up with."""
