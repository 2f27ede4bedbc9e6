"""The process that trains one block, from both sides.

process          the training process
spare_process    one that was started ahead of need
trainer          the node's side: orders with deadlines
weights_queue    changes to the running weights, in order
"""
