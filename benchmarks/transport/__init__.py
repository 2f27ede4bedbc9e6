"""Frames, digests and the ledger on a p2pd stream, against the same stream with nothing on it.

p2pd        the three ways, and both of their processes
ledger      the ledger against the kernel
light       a pull over py-libp2p
"""
