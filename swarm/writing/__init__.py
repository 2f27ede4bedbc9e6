"""Text out of blocks: what is drafted, checked, kept, and through which hosts it goes.

generate       byte after byte, with key/value caches
speculative    what is kept of drafts
writer         a client's side of an output
sweep          one block's part of a sweep
denoise        all bytes of an output at once, in one traversal
route          which hosts a sweep goes through
"""
