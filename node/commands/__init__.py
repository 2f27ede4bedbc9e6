"""The commands of `blockswarm`: options in, text or JSON out; the work is done elsewhere."""
