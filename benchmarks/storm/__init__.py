"""A storm on the emulated WAN: hosts and daemons are killed, stopped, cut off, lied to; what holds?

rows        a storm from its first host to its judgement
swarm       the swarm that it comes over
faults      the faults, by the clock, and what is seen of the hosts meanwhile
checks      what must hold, judged from event logs and samples of processes
"""
