"""What the demo's swarm is measured against: the same run on one machine, with no swarm.

One worker a block, the same steps and rounds, as `blockswarm train` does it; judged as the
assembled model is, by the same bytes and with a composition fitted on the same others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swarm.runfile import RunFile

SHOWN = 4  # remarks on the way


def train_alone(file: RunFile, evaluation_bytes: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The CE of the model that one machine makes with the run's steps."""
    import torch

    from node.assembly.job import Judge
    from node.data.corpus import load_corpus
    from node.data.windows import WindowStream, stream_seed
    from swarm.learning.composition import ComposedModel
    from swarm.learning.local import LocalSwarm

    run, corpus = file.run, load_corpus(file.data.spec)
    judge = Judge(corpus, file.data.spec, run.model.context, evaluation_bytes)
    machine = LocalSwarm(run, torch.device("cpu"))
    training = run.training
    seed = stream_seed("windows", run.seed)
    stream = WindowStream(corpus.train, run.model.context, training.batch, seed)
    for step in range(training.steps):
        if step % max(1, training.steps // SHOWN) == 0:
            say(f"the same on one machine, without a swarm: step {step} of {training.steps}")
        windows = torch.from_numpy(stream.batch_at(step)).long()
        machine.step(windows[:, :-1], windows[:, 1:])
    model = judge.fit(ComposedModel(run, machine.composed_blocks()))
    return {"ce_nats": judge.report(model).ce_nats, "steps": training.steps}
