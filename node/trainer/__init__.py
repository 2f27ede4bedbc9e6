"""The process that trains one block, from both sides.

process          the training process
spare_process    a training process started early, before its order is known
trainer          the node's side: orders with deadlines
weights_queue    changes to the running weights, in order
"""
