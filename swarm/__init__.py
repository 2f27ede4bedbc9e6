"""What peers decide and compute together: model, objective, composition, rounds, aggregation.

No I/O: time, randomness and network are passed in, so that the simulator and the live node
run the same code. Of the folders, each may import those above it.

    learning/      a block: its layers, noise and objective, its worker; blocks as one model
    writing/       text out of blocks: sampling, drafts, sweeps, joint denoising
    consensus/     updates as one step, in integers; a block's log; whom to trust
    rounds/        a round as a pure state machine, from clock to verdict

    tables         dataclasses from tables that a stranger may have written
    run            a run: shape, noise, objective, schedule, checked and frozen
    runfile        the TOML file that names a run
    run_template   its text, explained line by line, and the presets
    plan           a run's rounds and densities, from its length and its hosts
    cost           what it costs to join: memory, bytes, disk
    assignment     which block a host works on
    events         the event log's schema
"""
