"""All blocks on one machine, with no network: training, checkpoints, the model folder."""
