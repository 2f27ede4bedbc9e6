"""A host in a run, from its options to its goodbye.

taking_part        what a host is told and shows, and how it leaves
workers            several workers of one host, and who looks after them
fleet              which block each of them takes
joining            which run an address leads to
home               a host's folder
options            what a person may say of a host
settings           what a host is told
cost_words         what taking part will cost
live_line          one line on a terminal, or log lines

host               its network, its budget, which block
seed_peer          a seed that does not train
block_choice       which block it works on; when it moves
first_consensus    what it begins with there
block_work         its work on a block: training, replica, copies
training           the training of its block, round by round
budget             bytes a day
state              what it keeps on disk
saving             when that is written
events             what it writes down
event_log          one JSON line for each
"""
