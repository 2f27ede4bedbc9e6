"""A small archive, and a real HTTP server on loopback for it with the faults that servers have."""

from __future__ import annotations

import enum
import hashlib
import io
import socket
import struct
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SPLITS = {
    f"wiki.{split}.raw": f"{split}: ".encode() + hashlib.sha256(split.encode()).digest() * 4000
    for split in ("train", "valid", "test")
}


def make_zip(files: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as target:
        for name, content in files.items():
            target.writestr(zipfile.ZipInfo(name), content, compress_type=method)
    return buffer.getvalue()


PACKED = make_zip({f"wikitext-x-raw/{name}": content for name, content in SPLITS.items()})
OTHER = PACKED[:1000] + bytes(1000) + PACKED[2000:]  # another version, of the same length


class Fault(enum.Enum):
    NONE = "a well-behaved server"
    CUT = "the connection ends in the middle"
    RESET = "the connection is reset in the middle"
    NO_RANGE = "Range is ignored"
    WRONG_RANGE = "206 with a range that was not asked for"
    NOT_SATISFIABLE = "416 to any Range"
    MISSING = "404"
    OVERLOADED = "503"
    LONGER = "Content-Length is larger than the file should be"
    SHORTER = "Content-Length is smaller than the file should be"
    ENDLESS = "no Content-Length, and more bytes than there should be"
    UNSIZED = "no Content-Length, the right bytes"


@dataclass
class Script:
    """What the server does: one fault per request, the last one for all further requests."""

    faults: list[Fault] = field(default_factory=lambda: [Fault.NONE])
    body: bytes = PACKED
    requests: list[dict[str, str]] = field(default_factory=list)

    def next_fault(self) -> Fault:
        return self.faults.pop(0) if len(self.faults) > 1 else self.faults[0]


class Server(ThreadingHTTPServer):
    script: Script


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        script = self.server.script
        script.requests.append(dict(self.headers))
        fault = script.next_fault()
        if fault in (Fault.MISSING, Fault.OVERLOADED):
            return self.send_error(404 if fault is Fault.MISSING else 503)
        start, body = self._start(fault), script.body
        if start and fault is Fault.NOT_SATISFIABLE:
            return self.send_error(416)
        length = len(body) - start
        length += {Fault.LONGER: 10, Fault.SHORTER: -10}.get(fault, 0)
        self.send_response(206 if start else 200)
        if start:
            shown = start - 1 if fault is Fault.WRONG_RANGE else start
            self.send_header("Content-Range", f"bytes {shown}-{len(body) - 1}/{len(body)}")
        if fault not in (Fault.ENDLESS, Fault.UNSIZED):
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self._send(body[start:], fault)

    def _start(self, fault: Fault) -> int:
        wanted = self.headers.get("Range")
        if wanted is None or fault is Fault.NO_RANGE:
            return 0
        return int(wanted.removeprefix("bytes=").removesuffix("-"))

    def _send(self, body: bytes, fault: Fault) -> None:
        try:
            if fault is Fault.ENDLESS:
                body += bytes(100)
            if fault in (Fault.CUT, Fault.RESET):
                body = body[: len(body) // 2]
            self.wfile.write(body)
            if fault is Fault.RESET:
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        except OSError:
            pass  # the client had read enough
