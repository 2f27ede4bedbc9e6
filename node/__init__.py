"""One process on one machine, with all of its I/O: command line, data, storage, transport."""
