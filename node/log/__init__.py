"""A block's consensus log, as this host has it.

fetch        entries, updates and snapshots from a block's replicas
room         the version before, kept as room for the next one
consensus    the weights now, the steps back, what is served of them
catch_up     onto another head of the log
follow       the log of a block that one does not train
copies       the copies of other blocks that a worker reads
"""
