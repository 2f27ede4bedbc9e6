"""Serving a model of 75.80 billion parameters, by its shapes: one sweep beside a byte a traversal.

rows        one shape, served in all ways; what its time consists of; the figures of all rows
model       the shapes, and blocks of them that fit into this machine
matmul      products with weights of two bytes
bed         the three hosts and the client, on the emulated WAN
process     a host's or the client's process, with limits that allow its sizes
host        what a host's process does
client      what the client's does
table       the table and the plot in docs/benchmarks.md
"""
