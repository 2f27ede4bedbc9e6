"""What is wrong with this machine or its network, and what to do about it.

examine    the checks in their order, each bounded in time
machine    Python, packages, torch, memory, disk
network    port, p2pd, peers, clock, reachability
"""
