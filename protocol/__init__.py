"""What crosses the wire: identity, records, frames, messages, tensor codecs, the byte ledger.

No sockets and no training code. `SPEC.md` in this folder specifies every byte.
"""
