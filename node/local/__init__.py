"""All blocks on one machine, with no network.

jobs            the commands `train`, `eval`, `generate` and `probe`
training        the training loop, its checkpoints, the finished model
memory          whether a run fits into memory
model_folder    safetensors and manifest, checked when loaded
"""
