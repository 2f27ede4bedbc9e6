"""What the replicas of a block agree on: the aggregate of a round's updates, and the log of steps.

fixed_point    updates and weights as integers: the same bits on every CPU
sums           sums, means and inner products of several updates
trend          the sum of the last steps
aggregate      the agreed updates as one step: clip, robust rule, mean
feedback       error feedback: what a sender has learned and the consensus lacks
votes          the votes of a round, and the set of updates that they agree on
log            the consensus of a block as a log
forks          which branch a replica should follow
trust          faults and exclusion of peers; the canary
schedule       how dense the updates of each exchange are
updates        encoding and decoding of updates, replay of the log, snapshots
step           the next entry of the log, from the agreed updates
"""
