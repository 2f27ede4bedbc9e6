"""What peers compute and decide together: model, objective, composition, rounds, aggregation.

No I/O: time, randomness and network are passed in, so that the simulator and the live node run
the same code. A folder may import those listed above it.

    learning/      a block: its layers, noise and objective, its worker; blocks as one model
    writing/       generating text with blocks: sampling, drafts, sweeps, joint denoising
    consensus/     aggregating updates, in integers; a block's log; trust in peers
    rounds/        a round as a pure state machine, from clock to report

    tables         dataclasses from untrusted TOML and JSON tables
    run            a run: shape, noise, objective, schedule, checked and frozen
    runfile        the TOML file that defines a run
    run_template   its text, explained line by line, and the presets
    plan           a run's rounds and densities, from its length and its hosts
    cost           what joining a run costs: memory, bytes, disk
    assignment     which block a host works on
    events         the event log's schema
"""
