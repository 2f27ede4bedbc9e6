"""Diagnose this machine and its network, and suggest fixes.

examine    run all checks in order, each with a timeout
machine    Python, packages, torch, memory, disk
network    port, p2pd, peers, clock, reachability
"""
