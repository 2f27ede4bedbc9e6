"""What crosses the wire: identity, records, frames, messages, tensor codecs, the byte ledger.

Knows nothing of models, training or sockets. `SPEC.md` in this folder is its contract.
"""
