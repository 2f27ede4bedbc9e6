"""The paper's public-network experiments on the emulated WAN: CE gained, bytes moved, who helped.

rows        which there are, what is said of one, the figures of all of them
swarm       one run of a swarm, from its first host to the assembled model
table       the tables and the plot in docs/benchmarks.md
"""
