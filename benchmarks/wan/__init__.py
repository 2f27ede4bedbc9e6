"""A WAN on one machine: hosts as network namespaces, joined by an emulator in user space.

bed         a test-bed that is up: its hosts, commands that run on them, partitions, counters
namespaces  made, entered, counted, removed
forwarder   the emulator: a process that reads all packets and delivers them late
links       when a packet arrives, or that it is lost
nat         a home router's translation of addresses
topology    what a topology file says
checks      ... and whether it may
processes   commands of ours on hosts of a bed
runner      a swarm on a bed, from its seed to every ledger and counter
events      what the event logs of such a swarm say
probe       round-trip time, loss and throughput, measured from inside
"""
