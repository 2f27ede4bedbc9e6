"""The latest consensus of every block as one model.

pull     pull every block's consensus and check it
store    keep pulled versions beside the model, so that a second run pulls only what is new
job      the `assemble` command: look up, pull, judge, write
"""
