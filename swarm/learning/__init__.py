"""Training of a block, and composition of blocks to one model; without peers or rounds.

model              layers, a self-contained block
gradients          rotation, norm and ReLU, in fewer passes over memory
head_loss          the head's loss, likewise
optimizer          how weights follow their gradients: Muon, AdamW
noise              which sigmas a block trains on, the targets, the leak
objective          how a prediction meets the evidence of z: bayes, edm, plain
joint_denoising    all bytes of an output at once: what a block trains on for that
coupling           which versions of other blocks a worker reads
moving_copy        copies of other blocks that move gradually to new versions
worker             trains one block
flat               a block's weights as one vector
composition        the blocks' predictions as one
evaluate           honest and teacher-forced CE
local              all workers in one process
"""
