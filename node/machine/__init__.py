"""This machine: files, processes, memory, devices, clocks. Knows nothing of swarms or models."""
