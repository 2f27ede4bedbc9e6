"""One replica of a block, live: the pure round of `swarm` with real peers and a trainer.

replica            actions into requests and arithmetic, answers into events
board              its record and those of others
notices            whose records are kept and shown
held_answers       of two with something to tell, one asks
exchange           pulls with their checks, votes with their signatures
own_updates        our own updates in flight
aggregation        the step to the next consensus
running_weights    the weights in training, and what they owe
canary             the consensus on held-out text; who made it worse
service            what a replica answers to others
"""
