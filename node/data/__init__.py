"""Text as bytes.

corpus      which text, and how it is split
download    WikiText, fetched once and verified
windows     which bytes are in a batch, and in an evaluation
"""
