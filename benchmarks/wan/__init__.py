"""A WAN on one machine: hosts as network namespaces, joined by an emulator in user space."""
