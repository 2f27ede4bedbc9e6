"""Averaging the same vectors among the same number of processes: ours beside hivemind's.

rounds         timed rounds of both systems in turn
killed         rounds in which a peer is killed
rows           what a row says, and the figures of all rows
swarm          the peers' processes, started, told what to do, ended
peer           a peer of ours
hivemind_peer  a peer of hivemind's
"""
