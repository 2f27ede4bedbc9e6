"""The commands of `blockswarm`: options in, text or JSON out; the work is done elsewhere.

local          train, eval, generate MODEL, probe
init           init
swarm          seed, join
assemble       assemble, status
serve          serve, generate ADDRESS
gateway        gateway
report         report
light          peers --light
doctor         doctor
simulate       simulate
demo           demo
demo_swarm     the swarm that it starts
demo_alone     the same on one machine, to compare
options        numbers and addresses as typed
"""
