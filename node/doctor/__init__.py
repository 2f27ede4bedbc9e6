"""What is wrong with this machine or its network, and what to do about it."""
