"""One process on one machine, with all of its I/O: command line, data, storage, transport.

Of the folders, each may import those above it; `cli` is the command `blockswarm`.

    machine/     files, processes, memory, devices, clocks of this machine
    data/        text as bytes: corpora, downloads, windows
    console/     what a person at a terminal sees
    network/     peers and how to reach them: p2pd, DHT, streams, addresses
    local/       all blocks on one machine, with no network
    trainer/     the process that trains one block
    log/         a block's consensus log: fetched, followed, held
    replica/     one replica of a block, live: the pure round with real peers
    serving/     sweeps through blocks: a host's side and a client's
    host/        a host in a run: its block, budget, folder, display
    assembly/    blocks pulled, checked and written as one model
    simulator/   real hosts on a made-up network, in virtual time
    report/      how a run stands, and how it went
    gateway/     HTTP in front of a swarm that serves
    doctor/      what is wrong here, and what to do about it
    commands/    the commands: options in, text or JSON out
"""
