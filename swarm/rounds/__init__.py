"""A round as a pure state machine: events in, actions out, the time passed in.

clock           which round it is, on a machine whose clock may be off
deadline        how long a round collects updates
actions         events and actions of a round
state           the state of the machine
phases          when a phase ends: the vote, the agreed set, the step
heads           steps and moves of a replica's consensus
report          the report on a round
round           the state machine
"""
