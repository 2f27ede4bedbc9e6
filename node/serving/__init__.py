"""Sweeps through blocks. A host's side:

    host         a host that only serves
    trained      serving beside training
    server       the versions served, and admission of sweeps
    queue        the sweeps at this host, and their batches
    sessions     the key/value caches of clients' texts
    compute      the computation of one block on a batch of sweeps
    parts        sweeps that come in parts
    carry        send a computed sweep to the next host, or the result to the client
    handover     try one replica after another until one takes the sweep
    streams      streams kept open to other peers

and a client's:

    client       routes, sweeps and their results
    output       one output, with retries
"""
