"""The process that trains one block, and the node's side of it."""
