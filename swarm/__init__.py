"""What peers decide and compute together: model, objective, composition, rounds, aggregation.

No I/O: time, randomness and network are passed in, so that the simulator and the live node
run the same code.
"""
