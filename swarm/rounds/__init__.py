"""A round as a pure state machine: events in, actions out, the time passed in.

clock           which round it is, on a machine whose clock may be off
deadline        how long a round collects updates
actions         events and actions of a round
state           what a replica knows in it
phases          when a phase ends: votes, the agreed set
heads           how its consensus moves
report          what is said about it
round           all of that as one
"""
