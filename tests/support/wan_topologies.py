"""Topologies that several tests of the emulated WAN describe their beds with."""

from __future__ import annotations

TWO = """
[wan]
rtt_ms = 40
[[hosts]]
name = "a"
address = "11.1.0.1"
[[hosts]]
name = "b"
address = "11.2.0.1"
"""
