"""The description of a test-bed: hosts, their links, paths between them, partitions, and a swarm.

Decides what a topology file (TOML) may say and what is meant where it says nothing. Every mistake
is refused by name. Knows nothing of namespaces or packets.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.wan import checks
from benchmarks.wan.checks import TopologyError

MAX_FILE_BYTES = 1 << 20
MAX_HOSTS = 64
MAX_WORKERS = 16
_NAME = re.compile(r"[a-z][a-z0-9]{0,11}")


@dataclass(frozen=True)
class Link:
    """A host's access line: what is between it and the core of the WAN, in each direction."""

    up_mbit: float = 100.0
    down_mbit: float = 100.0
    queue_ms: float = 200.0  # a packet that would wait longer is dropped
    loss_percent: float = 0.0  # of the packets in each direction

    def __post_init__(self) -> None:
        checks.within("up_mbit", self.up_mbit, 0.01, 100_000)
        checks.within("down_mbit", self.down_mbit, 0.01, 100_000)
        checks.within("queue_ms", self.queue_ms, 1, 60_000)
        checks.within("loss_percent", self.loss_percent, 0, 90)


@dataclass(frozen=True)
class Host:
    """One host. Behind NAT `address` is its router's, which it does not know itself."""

    name: str
    address: str
    link: Link = Link()
    nat: bool = False
    role: str = "join"  # seed, join, or none: there, but without a swarm's process
    workers: int = 1  # processes of the swarm on it
    cpu_percent: float = 0.0  # of one core, all of its processes together; 0: no limit
    options: tuple[
        str, ...
    ] = ()  # of `blockswarm seed` or `join`; {seed} and {block} are filled in

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise TopologyError(
                f"'{self.name[:40]}' is not a host's name",
                "up to 12 of a-z and 0-9, a letter first",
            )
        try:
            ip = ipaddress.IPv4Address(self.address)
        except ValueError:
            ip = None
        if ip is None or ip.is_loopback or ip.is_multicast or ip.is_unspecified or ip.is_reserved:
            raise TopologyError(
                f"host {self.name}: '{self.address[:40]}' is no IPv4 address of a host",
                'for example address = "11.1.0.1"',
            )
        if self.role not in ("seed", "join", "none"):
            raise TopologyError(
                f"host {self.name}: there is no role '{self.role[:40]}'", "seed, join or none"
            )
        checks.within("workers", self.workers, 1, MAX_WORKERS)
        checks.within("cpu_percent", self.cpu_percent, 0, 100)


@dataclass(frozen=True)
class Route:
    """What is between two hosts besides their links: the long way. The same in both directions."""

    rtt_ms: float = 50.0
    jitter_ms: float = 0.0  # a packet takes up to so much longer; packets do not overtake
    loss_percent: float = 0.0

    def __post_init__(self) -> None:
        checks.within("rtt_ms", self.rtt_ms, 0, 60_000)
        checks.within("jitter_ms", self.jitter_ms, 0, 60_000)
        checks.within("loss_percent", self.loss_percent, 0, 90)


@dataclass(frozen=True)
class Partition:
    """From `from_s` to `to_s` after the swarm's start these hosts and all others are apart."""

    from_s: float
    to_s: float
    apart: tuple[str, ...]


@dataclass(frozen=True)
class Swarm:
    """What runs on the bed. Without a run file: the preset's."""

    seconds: float = 120.0
    run_file: str = ""
    preset: str = "tiny"
    data: str = ""
    threads: int = 1


@dataclass(frozen=True)
class Topology:
    """All of it. `paths` holds only pairs that differ from `path`; keys are sorted pairs."""

    name: str
    hosts: tuple[Host, ...]
    path: Route = Route()
    paths: Mapping[tuple[str, str], Route] | None = None
    mtu: int = 1500
    seed: int = 0
    partitions: tuple[Partition, ...] = ()
    swarm: Swarm = Swarm()

    def __post_init__(self) -> None:
        if not 1 <= len(self.hosts) <= MAX_HOSTS:
            raise TopologyError(f"{len(self.hosts)} hosts", f"describe 1 to {MAX_HOSTS} [[hosts]]")
        checks.unique("name", [host.name for host in self.hosts])
        checks.unique("address", [host.address for host in self.hosts])
        checks.within("mtu", self.mtu, 576, 9000)
        seeds = [host.name for host in self.hosts if host.role == "seed"]
        if len(seeds) > 1:
            raise TopologyError(f"{' and '.join(seeds)} are both the seed", "one host is the seed")
        names = {host.name for host in self.hosts}
        for pair in self.paths or {}:
            checks.known(names, pair, "a path")
        for cut in self.partitions:
            checks.known(names, cut.apart, "a partition")
            if not 0 <= cut.from_s < cut.to_s:
                raise TopologyError("a partition ends before it begins", "from_s < to_s")

    def between(self, one: str, other: str) -> Route:
        pair = (one, other) if one < other else (other, one)
        return (self.paths or {}).get(pair, self.path)

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)


def load(path: Path) -> Topology:
    """A topology file. Raises `TopologyError`."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TopologyError(f"cannot read {path}: {error.strerror}", "name a .toml file") from error
    if len(data) > MAX_FILE_BYTES:
        raise TopologyError(f"{path} is too large for a topology", "it has at most 1 MiB")
    return parse(data)


def parse(data: bytes) -> Topology:
    try:
        table = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"not TOML: {error}", "see docs/wan.md for an example") from error
    checks.only("the file", table, "name", "wan", "hosts", "paths", "partitions", "swarm")
    wan = checks.table("wan", table.get("wan", {}))
    own = {k: wan.pop(k) for k in ("mtu", "seed") if k in wan}
    links = {
        k: wan.pop(k) for k in list(wan) if k in checks.names(Link) and k not in checks.names(Route)
    }
    usual, usual_link = checks.made(Route, "wan", wan), checks.made(Link, "wan", links)
    hosts = tuple(_host(entry, usual_link) for entry in checks.tables("hosts", table))
    return Topology(
        checks.typed("name", table.get("name", "wan"), str),
        hosts,
        usual,
        dict(_path(entry, usual) for entry in checks.tables("paths", table)),
        checks.typed("mtu", own.get("mtu", 1500), int),
        checks.typed("seed", own.get("seed", 0), int),
        tuple(_partition(entry) for entry in checks.tables("partitions", table)),
        checks.made(Swarm, "swarm", checks.table("swarm", table.get("swarm", {}))),
    )


def _host(entry: dict[str, Any], usual: Link) -> Host:
    name = entry.get("name", "?")
    link = {k: entry.pop(k) for k in list(entry) if k in checks.names(Link)}
    if "link" in entry:
        raise TopologyError(f"host {name}: unknown field link", "write up_mbit = 10 and the like")
    options = entry.pop("options", [])
    if not isinstance(options, list) or not all(isinstance(o, str) for o in options):
        raise TopologyError(f"host {name}: options is a list of texts", 'options = ["--verbose"]')
    made = checks.made(
        Link, f"host {name}", {**{k: getattr(usual, k) for k in checks.names(Link)}, **link}
    )
    for needed in ("name", "address"):
        if needed not in entry:
            raise TopologyError(f"host {name} has no {needed}", f"every host has a {needed}")
    return checks.made(Host, f"host {name}", {**entry, "link": made, "options": tuple(options)})


def _path(entry: dict[str, Any], usual: Route) -> tuple[tuple[str, str], Route]:
    pair = entry.pop("between", None)
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(n, str) for n in pair):
        raise TopologyError("a path says between which two hosts", 'between = ["a", "b"]')
    one, other = sorted(pair)
    values = {**{k: getattr(usual, k) for k in checks.names(Route)}, **entry}
    return (one, other), checks.made(Route, f"the path {one}-{other}", values)


def _partition(entry: dict[str, Any]) -> Partition:
    apart = entry.get("apart", [])
    if not isinstance(apart, list) or not apart or not all(isinstance(n, str) for n in apart):
        raise TopologyError("a partition names the hosts that are cut off", 'apart = ["a"]')
    for needed in ("from_s", "to_s"):
        if needed not in entry:
            raise TopologyError(f"a partition has no {needed}", "from_s = 30, to_s = 60")
    return checks.made(Partition, "a partition", {**entry, "apart": tuple(apart)})
