"""Everything of a request but its content: lines, headers, chunks, and what is odd about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

INNER = b"GET /livez HTTP/1.1\r\nhost: x\r\nx-request-id: smuggled\r\n\r\n"


@dataclass(slots=True)
class Head:
    """A request line and headers, not yet bytes. Lines without an end get CRLF."""

    method: bytes
    target: bytes
    fields: list[bytes] = field(default_factory=list)
    version: bytes = b"HTTP/1.1"
    line: bytes | None = None  # instead of the three words
    newline: bytes = b"\r\n"

    def render(self) -> bytes:
        line = self.line if self.line is not None else b" ".join((self.method, self.target, self.version))
        return self.newline.join((line, *self.fields, b"", b""))

    def without(self, name: bytes) -> None:
        self.fields = [each for each in self.fields if not each.lower().startswith(name + b":")]


# Lines that are put into a head.
ODD_FIELDS: tuple[bytes, ...] = (
    b"Host: evil", b"Host:", b"Host: a b", b"host: x\x00y", b"Host : x", b" folded: x", b"\tfolded",
    b"x-folded: a\r\n b", b"no colon", b": no name", b"x y: space in a name", b"x\x00: NUL in a name", b"x-nul: a\x00b",
    b"x-cr: a\rb", b"x-lf: a\nb: c", b"x-bare: a\n", b"x-high: \xff\xfe", b"x-del: \x7f", b"x-empty:", b"x-tab:\ta\t",
    b"\xffname: x", b"Content-Length: 0", b"Content-Length: 5", b"Content-Length: 99999999",
    b"Content-Length: 18446744073709551616", b"Content-Length: -1", b"Content-Length: +5", b"Content-Length: 0x5",
    b"Content-Length: 5, 5", b"Content-Length: 5, 6", b"Content-Length: ", b"Content-Length: 1e1",
    b"Content-Length:\x0b5", b"content-length: \xb2", b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity",
    b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding: chunked, chunked", b"Transfer-Encoding: xchunked", b"Transfer-Encoding:\x0bchunked",
    b"Transfer-Encoding: Chunked ", b"Transfer-Encoding:", b"Transfer-Encoding : chunked",
    b"Transfer-Encoding: chunked;q=1", b"Transfer-Encoding:\r\n chunked", b"TE: trailers", b"Connection: close",
    b"Connection: keep-alive, close", b"Connection: content-length", b"Connection: ,,", b"Expect: 100-continue",
    b"Expect: 200-maybe", b"Content-Encoding: gzip", b"Content-Encoding: identity", b"Accept: application/octet-stream",
    b"Accept: application/octet-stream;q=0", b"Accept: \xff;q=x", b"Content-Type: text/plain; charset=utf-16",
    b"Content-Type:", b"Range: bytes=0-1", b"If-None-Match: *", b"Origin: http://evil", b"Authorization: Bearer \xff",
    b"Authorization:", b"Cookie: " + b"a" * 1000, b"X-Request-Id: \xff", b"X-Request-Id: " + b"i" * 200,
    b"X-Request-Timeout: 1e3", b"X-Request-Timeout: -1", b"X-Request-Timeout: nan", b"X-Request-Timeout: 0.000000001",
    b"X-Priority: bulk", b"X-Priority: urgent", b"X-Forwarded-For: 1.2.3.4", b"X-Forwarded-Proto: https",
    b"X-HTTP-Method-Override: DELETE", b"Proxy: x", b"x-long: " + b"v" * 30_000, b"x-longer: " + b"v" * 100_000,
    b"n" * 3000 + b": x",
)  # fmt: skip

ODD_LINES: tuple[bytes, ...] = (
    b"", b"GET", b"GET /livez", b"GET  /livez HTTP/1.1", b"GET /li vez HTTP/1.1", b"GET /livez HTTP/1.1 ",
    b" GET / HTTP/1.1", b"GET\t/livez\tHTTP/1.1", b"GET /livez HTTP/0.9", b"GET /livez HTTP/1.2",
    b"GET /livez HTTP/2.0", b"GET /livez HTTP/11", b"GET /livez http/1.1", b"GET /livez HTTPS/1.1",
    b"GET /livez HTTP/1.1x", b"GET \x00 HTTP/1.1", b"GET /\x00 HTTP/1.1", b"GET /\xff HTTP/1.1", b"GET /%00 HTTP/1.1",
    b"GET /%ff%fe HTTP/1.1", b"GET /%zz HTTP/1.1", b"GET /v1/models/%2e%2e HTTP/1.1", b"GET //livez HTTP/1.1",
    b"GET /../livez HTTP/1.1", b"GET http://evil/livez HTTP/1.1", b"GET http:///livez HTTP/1.1",
    b"GET http://[::1/livez HTTP/1.1", b"GET evil:99999 HTTP/1.1", b"GET * HTTP/1.1", b"OPTIONS * HTTP/1.1",
    b"GET /?" + b"q" * 20_000 + b" HTTP/1.1", b"GET /livez#fragment HTTP/1.1", b"GET ?q HTTP/1.1",
    b"HEAD /livez HTTP/1.1", b"HEAD /embed HTTP/1.1", b"PUT /embed HTTP/1.1", b"DELETE /v1/models/x HTTP/1.1",
    b"PATCH / HTTP/1.1", b"TRACE / HTTP/1.1", b"BREW / HTTP/1.1", b"get /livez HTTP/1.1", b"PRI * HTTP/2.0",
    b"SOURCE /livez HTTP/1.1", b"M-SEARCH * HTTP/1.1", b"GET /livez HTTP/1.0", b"POST /embed/ HTTP/1.1",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)  # fmt: skip


def odd(head: Head, random: Random) -> None:
    """Make one to three things about a head odd."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        match random.choices(range(7), (60, 12, 6, 6, 4, 6, 6))[0]:
            case 0:
                head.fields.insert(random.randint(0, len(head.fields)), random.choice(ODD_FIELDS))
            case 1:
                head.line = random.choice(ODD_LINES)
            case 2:
                head.without(b"host")
            case 3:
                head.fields.append(random.choice(head.fields or [b"x: y"]))
            case 4:
                head.newline = b"\n"
            case 5:
                head.version = random.choice((b"HTTP/1.0", b"HTTP/1.0", b"HTTP/1.3", b"HTTP/3"))
            case _:
                head.fields += [b"x-%d: y" % number for number in range(random.choice((50, 500, 5000)))]


def chunked(body: bytes, random: Random) -> bytes:
    """`body` in chunks, as it should be."""
    return b"".join(_chunks(body, random)) + b"0\r\n\r\n"


def odd_chunked(body: bytes, random: Random) -> bytes:
    """`body` in chunks, with something odd about one of them."""
    chunks = list(_chunks(body, random)) or [b"1\r\nx\r\n"]
    end = b"0\r\n\r\n"
    place = random.randrange(len(chunks))
    size, _, rest = chunks[place].partition(b"\r\n")
    match random.randrange(6):
        case 0:
            chunks[place] = random.choice(ODD_SIZES).replace(b"SIZE", size) + b"\r\n" + rest
        case 1:
            chunks[place] = size + random.choice((b"\n", b"\r", b"\r\r\n", b" \r\n", b"\r\n\r\n", b"")) + rest
        case 2:
            chunks[place] = (
                size + b"\r\n" + rest[:-2] + random.choice((b"", b"\n", b"\r", b"x\r\n", b"\r\n\r\n", b"0\r\n"))
            )
        case 3:
            chunks[place] = b"%x\r\n" % max(0, int(size, 16) + random.choice((-1, 1, 2, 5, 1000))) + rest
        case 4:
            end = random.choice(ODD_ENDS)
        case _:
            chunks.insert(place, random.choice((b"0\r\n\r\n", b"0\r\n", b"\r\n", INNER)))
    return b"".join(chunks) + end


ODD_SIZES = (
    b"0xSIZE", b"+SIZE", b"-SIZE", b" SIZE", b"SIZE ", b"SIZEg", b"000000000000000000SIZE", b"ffffffffffffffff",
    b"10000000000000000", b"7fffffffffffffff", b"", b"SIZE;a=b", b'SIZE;a="b\\"c"', b"SIZE;", b"SIZE;a\nb",
    b"SIZE;a\rb", b"SIZE;\x00", b"SIZE;" + b"e" * 5000, b"SIZE;" + b"e" * 200_000, b"zz", b"SIZE SIZE", b"SIZE\x0b",
    b"S",
)  # fmt: skip
ODD_ENDS = (
    b"", b"0\r\n", b"0\r\nx: y\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n", b"0\r\nno colon\r\n\r\n",
    b"0\r\n: x\r\n\r\n", b"0\n\n", b"00\r\n\r\n", b"0;last\r\n\r\n",
    b"0\r\nhost: y\r\nTransfer-Encoding: chunked\r\n\r\n", b"0\r\n\r\nX", b"0\r\n folded\r\n\r\n",
    b"0\r\n" + b"x: y\r\n" * 5000 + b"\r\n", b"0\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", b"0\r\n\r\n0\r\n\r\n",
)  # fmt: skip


def _chunks(body: bytes, random: Random) -> list[bytes]:
    chunks: list[bytes] = []
    position = 0
    while position < len(body):
        piece = body[position : position + random.choice((1, 7, 64, 1000, 65_536))]
        if len(chunks) > 200:
            piece = body[position:]
        position += len(piece)
        chunks.append(b"%x\r\n%b\r\n" % (len(piece), piece))
    return chunks


UPGRADES: tuple[tuple[bytes, ...], ...] = (
    (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c",
     b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"),
    (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13",
     b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="),
    (b"Connection: upgrade", b"Upgrade: TLS/1.0"),
    (b"Connection: keep-alive, Upgrade", b"Upgrade: h2c, websocket, foo/2"),
    (b"Connection: Upgrade", b"Upgrade:"), (b"Connection: Upgrade",), (b"Upgrade: h2c",),
    (b"Connection: Upgrade, close", b"Upgrade: websocket"),
)  # fmt: skip


def upgrade(head: Head, random: Random) -> None:
    """Ask for another protocol."""
    for each in random.choice(UPGRADES):
        head.fields.insert(random.randint(0, len(head.fields)), each)
