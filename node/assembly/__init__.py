"""The latest consensus of every block, pulled, checked and written as one model."""
