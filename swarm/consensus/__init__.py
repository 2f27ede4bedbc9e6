"""What the replicas of a block agree on: the agreed updates as one step, and the log of steps.

fixed_point    integers instead of floats: the same bits on every CPU
sums           sums, norms and products of several updates
trend          where the last steps went
aggregate      the agreed updates as one change: clip, robust rule, mean
feedback       what a sender has learned and the consensus does not contain yet
votes          votes, and the set that they agree on
log            the consensus of a block as a log
forks          which branch a replica should stand on
trust          whom a replica listens to; the canary
schedule       how dense the updates of each exchange are
updates        updates, votes and log entries between the round and the wire
step           the next entry of the log, from the agreed updates
"""
