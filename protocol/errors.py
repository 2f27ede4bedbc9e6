"""The base exceptions. Each tells the user what happened, the likely cause and the next step.

    BlockswarmError
    ├── UsageError            something that the user typed cannot work
    │   ├── DataError         a corpus is missing, too short, damaged
    │   ├── ModelError        a model folder is missing, altered, of another shape
    │   └── LeakError         a sigma range would show the block its target
    ├── IdentityError         the key file is missing, readable by others, in use
    └── WireError             a peer sent something that we refuse (see `protocol.frames`)

A foreseeable mistake is one of these and reaches the terminal as one or a few lines with exit
code 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations


class BlockswarmError(Exception):
    """Base of all foreseen errors. `hint` is the next thing to type or to change."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(BlockswarmError):
    """Something that the user typed cannot work."""


class DataError(UsageError):
    """A corpus is missing, too short or damaged."""


class ModelError(UsageError):
    """A model folder is missing, altered, or of another shape than its manifest says."""


class LeakError(UsageError):
    """A sigma range that would show the block its own target."""


class IdentityError(BlockswarmError):
    """The identity file is missing, damaged, readable by others, or in use."""


class WireError(BlockswarmError):
    """A peer sent something that we refuse."""
