"""The options of `join` and `seed`: typed as they were given, and in the units of the code."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from protocol.errors import UsageError

MBIT = 1e6 / 8
SHARED = ("max_memory", "max_gb_per_day", "up_mbps", "down_mbps")  # by workers of one host


@dataclass(frozen=True)
class HostOptions:
    """Names are those of the command line. None: no limit, or the default."""

    port: int = 0
    announce: tuple[str, ...] = ()
    listen: tuple[str, ...] = ()
    relay: tuple[str, ...] = ()
    block: int | None = None
    first_block: int | None = None  # to begin with; unlike `block` it may be left for another
    data: str | None = None
    device: str = "auto"
    threads: int | None = None
    max_memory: float | None = None
    max_gb_per_day: float | None = None
    up_mbps: float | None = None
    down_mbps: float | None = None
    no_serve: bool = False
    as_json: bool = False
    verbose: bool = False

    @property
    def memory_bytes(self) -> int | None:
        return None if self.max_memory is None else int(self.max_memory * 1e9)

    @property
    def bytes_per_day(self) -> int | None:
        return None if self.max_gb_per_day is None else int(self.max_gb_per_day * 1e9)

    @property
    def up_bytes_per_s(self) -> float | None:
        return None if self.up_mbps is None else self.up_mbps * MBIT

    @property
    def down_bytes_per_s(self) -> float | None:
        return None if self.down_mbps is None else self.down_mbps * MBIT

    def check(self) -> None:
        """Mistakes that can be seen before anything is started. Raises `UsageError`."""
        from node.network.addresses import check_own_addresses

        for text in self.announce:
            if not names_a_port(text) and not self.port:
                raise UsageError(
                    f"--announce {text} needs a port that stays the same",
                    f"add --port 4001, or --announce {text}:PORT if the router maps another one",
                )
        check_own_addresses(self.listen, self.port, self.relay)

    # Several workers of one host.

    def check_shared(self, count: int) -> None:
        """What makes no sense for several workers."""
        if self.block is not None:
            raise UsageError(
                "--block names one block, and workers take different ones",
                f"leave --block away, or start {count} hosts with a --folder each",
            )
        for text in self.announce:
            if names_a_port(text):
                raise UsageError(
                    f"--announce {text} names a port, and every worker has its own",
                    "give the IP or the name alone; worker N listens on --port + N - 1",
                )

    def shared(self, count: int, index: int, cores: int) -> HostOptions:
        """Those of one of `count` workers: limits are shared out, ports follow one another."""
        limits = {name: getattr(self, name) for name in SHARED}
        parts = {name: limit / count for name, limit in limits.items() if limit is not None}
        port = self.port + index if self.port else 0
        if port > 65535:
            raise UsageError(f"--port leaves no room for {count} workers", "give a lower one")
        threads = max(1, (self.threads or cores) // count)
        return replace(self, port=port, threads=threads, **parts)

    def arguments(self) -> list[str]:
        """As they are typed, but for --json. What is as by default is left out."""
        found: list[str] = []
        for field in fields(self):
            value, flag = getattr(self, field.name), "--" + field.name.replace("_", "-")
            if field.name == "as_json" or value == field.default:
                continue
            if value is True:
                found.append(flag)
            elif isinstance(value, tuple):
                found += [part for one in value for part in (flag, one)]
            else:
                found += [flag, str(value)]
        return found


def names_a_port(announced: str) -> bool:
    """Whether an --announce brings its own port. Raises `AddressError` if it is no address."""
    from node.network.addresses import from_option

    return from_option(announced, 1) == from_option(announced, 2)
