"""The latest consensus of every block as one model.

pull     pulled and checked
store    kept beside the model, so that a second run pulls only what is new
job      what `assemble` does: look, pull, judge, write
"""
