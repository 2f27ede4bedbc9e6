"""A block's consensus log, as this host holds it.

fetch        download entries, updates and snapshots from a block's replicas
room         reuse the memory of the previous consensus for the next one
consensus    the current weights, and what older versions are rebuilt from
catch_up     move to another head of the log
follow       keep up with the log of a block that this host does not train
copies       the copies of other blocks that a worker reads
"""
