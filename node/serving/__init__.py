"""Sweeps through blocks. A host's side:

    host         a host that only serves
    trained      serving beside training
    server       what it takes in, in which versions
    queue        the sweeps that are with it
    sessions     the caches of its clients' texts
    compute      through a block
    parts        sweeps that come in parts
    carry        on to the next host, or to the client
    handover     one replica after the other, until somebody has it
    streams      kept open to other peers

and a client's:

    client       routes, and ways around trouble
    output       one output, whatever fails
"""
