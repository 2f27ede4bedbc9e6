"""Text as bytes.

corpus      the texts to train on, and their splits
download    WikiText, downloaded once and verified
windows     the bytes of a batch, and of an evaluation
"""
