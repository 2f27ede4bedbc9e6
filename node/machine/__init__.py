"""This machine: files, processes, memory, devices, clocks. Knows nothing of swarms or models.

atomic           files that are there whole or not at all
tensor_file      tensors and their facts in one such file
child_process    a child that leaves with its parent
event_loop       uvloop, and SIGTERM that ends it like Ctrl-C
tasks            work in the background
going_on         what a loop does about an error that nobody foresaw
memory           how much there is; how this process gives it back
device           CUDA, MPS or CPU; threads; precision
steady_time      a clock that is never set
phases           how far the start of this process is
own_packages     that protocol, swarm and node are ours
whole_import     Ctrl-C while torch is imported
"""
