"""Peers and how to reach them: p2pd, the DHT, streams, addresses, clocks. Knows no blocks."""
