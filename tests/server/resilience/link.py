"""A resettable TCP connection to a server, for a gRPC client, which hides its own socket."""

from __future__ import annotations

import asyncio
import socket
import struct
import tempfile
from contextlib import suppress
from pathlib import Path

_RESET = struct.pack("ii", 1, 0)  # l_onoff, l_linger: close sends RST


class Link:
    """Listens on a unix socket and forwards each connection to `url` over TCP.

    Attributes:
        path: the target for gRPC.
    """

    def __init__(self, url: str) -> None:
        self._host, port = url.rsplit(":", 1)
        self._port = int(port)
        self._folder = tempfile.TemporaryDirectory(prefix="link-")
        self._socket = Path(self._folder.name) / "s"
        self.path = f"unix:{self._socket}"
        self._writers: list[asyncio.StreamWriter] = []
        self._cut = False

    async def open(self) -> None:
        """Start listening."""
        self._server = await asyncio.start_unix_server(self._carry, self._socket)

    def cut(self) -> None:
        """Reset the connections to the server, as when a machine is power-cycled."""
        self._cut = True
        while self._writers:
            writer = self._writers.pop()
            if (sock := writer.get_extra_info("socket")).family != socket.AF_UNIX:
                with suppress(OSError):  # gone already
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def close(self) -> None:
        """Stop listening, and reset the connections."""
        self.cut()
        self._server.close()
        await self._server.wait_closed()
        self._folder.cleanup()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if self._cut:  # gRPC reconnects
            writer.transport.abort()
            return
        out_reader, out_writer = await asyncio.open_connection(self._host, self._port)
        self._writers.append(out_writer)
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(reader, out_writer))
            group.create_task(_pump(out_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
