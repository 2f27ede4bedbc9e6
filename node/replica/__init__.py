"""One replica of a block, live: the pure round of `swarm` with real peers and a trainer."""
