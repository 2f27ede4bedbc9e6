"""All blocks on one machine, with no network.

jobs            what `train`, `eval`, `generate` and `probe` do
training        the loop, its checkpoints, the model at the end
memory          whether a run fits into memory
report          what `eval` and `probe` tell
model_folder    safetensors and manifest, checked when loaded
"""
