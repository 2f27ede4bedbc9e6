"""Blocks that answer: a host's side of a sweep, and a client's."""
