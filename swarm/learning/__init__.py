"""Training of a block, and composition of blocks to one model; without peers or rounds.

model              layers, a self-contained block, the end-to-end reference
gradients          rotation, norm and squared ReLU in fewer passes over memory
head_loss          the head's cross entropy, a slice of rows at a time
optimizer          Muon and AdamW
noise              the sigmas of each block, the targets, the leak
objective          the denoising objectives: bayes, edm, plain
joint_denoising    training and sweeps that denoise all output bytes together
coupling           which versions of other blocks a worker reads
moving_copy        copies of other blocks that move gradually to new versions
worker             trains one block
flat               a block's weights as one vector
composition        the blocks' predictions as one
evaluate           honest and teacher-forced CE
local              all workers in one process
reference          trains the end-to-end reference
"""
