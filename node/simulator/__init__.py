"""A swarm in one process and in virtual time, from one seed: real hosts on a made-up network.

scenario        what is simulated: hosts, links, faults; read from a file
world           the hosts, the clock and the network between them
network         a host's network whose peers are other hosts of the world
toy_trainer     training that is a walk toward a goal
liar            replicas that lie
story           what happened, and whether it went well
virtual_time    an event loop whose time passes only by waiting
"""
