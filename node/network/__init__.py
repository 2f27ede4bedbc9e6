"""Peers and how to reach them. Decides nothing about training or about what a round exchanges.

addresses         multiaddresses: typed, listened on, announced, dialled
invitation        a run from nothing but an address
network           ask, answer, announce, look up: one object for the rest of the node
client            a guest of a run, reachable by nobody
peers             the network of those who only ask
kept_files        what a node writes again from time to time

daemon            the p2pd child process
socket_folder     the private folder where a node and its p2pd meet
hivemind_parts    what we use of hivemind, without the rest of it
transport         p2pd as a carrier of our frames
p2pd_stream       one connection to p2pd as a stream of frames
stream_pool       streams kept open between two questions
stale_line        connections that are dead although the line works
light             the same over py-libp2p, without p2pd

service           answering streams, within limits
gate              how much at once; busy, and when to come back
pace              bytes a second

dht               a DHT of signed records, and of nothing else
ring              this node's place in it, and the walks towards a key
discovery         who is in the run, and where
standing          how well a peer is known
dial_back         one knock at a door
reachability      can others reach this host
peer_clock        the run's clock on this host
"""
