"""This machine: files, processes, memory, devices, clocks. Independent of swarms and models.

atomic           atomic file writes; folder locks
tensor_file      tensors and metadata in one such file
child_process    child processes that end with their parent
event_loop       uvloop; SIGTERM ends it like Ctrl-C
tasks            background tasks
going_on         log an unexpected error in a loop and go on
memory           available memory; settings of the C allocator
device           CUDA, MPS or CPU; threads; precision
steady_time      a clock that does not follow steps of the wall clock
phases           timings of this process's start
own_packages     check that protocol, swarm and node are ours
whole_import     Ctrl-C while torch is imported
"""
