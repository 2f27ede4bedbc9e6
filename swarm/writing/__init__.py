"""Generating text with blocks: drafts, verification, sweeps over hosts, joint denoising.

generate       byte after byte, with key/value caches
speculative    which part of a draft is kept
writer         the client's side of an output
sweep          one block's part of a sweep
denoise        all bytes of an output at once, in one traversal
route          which hosts a sweep goes through
"""
