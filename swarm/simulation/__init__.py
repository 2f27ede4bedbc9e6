"""A seeded swarm in one process: the live node's rounds, on a network that is made up.

simulator    the clock, the network, its faults
host         a replica whose training is a pull toward a goal
lies         what a lying one does
"""
