"""The swarm that a storm comes over: a small run, and its hosts on the emulated WAN."""

from __future__ import annotations

from swarm.run import ModelShape, Run, Training, usual_learning_rate
from swarm.runfile import DataRules, ExchangeRules, RoundSchedule, RunFile

PERIOD_S = 5.0
HOSTS = ("seed", "ann", "bob", "cem", "dia", "eve", "fay")
QUICK_HOSTS = HOSTS[:4]


def storm_run(rounds: int) -> RunFile:
    """As small as a run can be that still learns within minutes."""
    shape = ModelShape(blocks=2, layers=1, width=32, heads=2, context=64)
    steps = rounds * 10
    training = Training(
        steps=steps,
        steps_per_round=10,
        batch=4,
        learning_rate=usual_learning_rate(steps),
        warmup_steps=20,
    )
    schedule = RoundSchedule(0, PERIOD_S, rounds, 0.5, 1.5, 0.5, 0.6)
    exchange = ExchangeRules("topk:0.05:2:overall", snapshot_every=8, min_replicas=1)
    return RunFile(
        "storm", Run(shape, training=training), DataRules("python", ""), schedule, exchange
    )


def topology(names: tuple[str, ...]) -> str:
    """Ordinary hosts, and two that come later: one lies, one is a newcomer."""
    parts = ['name = "storm"\n[wan]\nrtt_ms = 60\njitter_ms = 2\n']
    for place, name in enumerate((*names, "liar", "new"), 1):
        role = "none" if name in ("liar", "new") else "seed" if name == "seed" else "join"
        parts.append(
            f'[[hosts]]\nname = "{name}"\naddress = "11.{place}.0.1"\nrole = "{role}"\n'
            'options = ["--block", "{block}"]\n'
        )
    return "".join([*parts, '[swarm]\nrun_file = "run.toml"\n'])
