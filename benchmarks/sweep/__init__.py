"""Serving over a WAN: a whole output per traversal beside a byte per traversal, and their quality.

rows        the time of an output, its quality, many clients; the figures of all rows
modes       the modes that are compared, how much of each, what counts as trouble
model       the model that is served, and the judges of what it writes
hosts       the three hosts and the client, on a bed
client      the client's process
table       the tables and the plot in docs/benchmarks.md
"""
