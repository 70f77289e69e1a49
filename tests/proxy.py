"""A TCP proxy on loopback that counts a SuperNode's HTTP requests, and can cut them off."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter

BUFFER_BYTES = 65_536


class Proxy:
    """Passes connections on to a SuperLink.

    Attributes
    ----------
    sent_bytes : Counter
        Bytes from client to SuperLink by request path, headers included.
    requests : Counter
        Whole requests by path.
    cuts : int
        Connections that were cut in the middle of a request.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.sent_bytes: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.cuts = 0
        self._to_cut: Counter[str] = Counter()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_next(self, path: str, times: int = 1) -> None:
        """Cut the next connections in the middle of a request to this path."""
        with self._lock:
            self._to_cut[path] += times

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        target = ("127.0.0.1", self._target)
        with (
            client,
            contextlib.suppress(OSError),
            socket.create_connection(target) as server,
        ):
            back = threading.Thread(target=self._pass_back, args=(server, client), daemon=True)
            back.start()
            while self._pass_request(client, server):
                pass
            with contextlib.suppress(OSError):  # wakes the other direction
                server.shutdown(socket.SHUT_RDWR)
            back.join()

    def _pass_back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(BUFFER_BYTES):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def _pass_request(self, client: socket.socket, server: socket.socket) -> bool:
        """Pass one request on; tell whether the connection stays."""
        data = b""
        while b"\r\n\r\n" not in data:
            more = client.recv(BUFFER_BYTES)
            if not more:
                return False
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        path = lines[0].split()[1]
        fields = dict(line.lower().split(": ", 1) for line in lines[1:])
        assert "transfer-encoding" not in fields, "chunked requests are not understood"
        remaining = int(fields.get("content-length", 0)) - len(body)
        with self._lock:
            is_cut = self._to_cut[path] > 0
            if is_cut:
                self._to_cut[path] -= 1
                self.cuts += 1
        if is_cut:
            data = data[: len(head) + 4 + len(body) // 2]
        while data:
            server.sendall(data)
            with self._lock:
                self.sent_bytes[path] += len(data)
            if is_cut:
                return False
            data = client.recv(min(remaining, BUFFER_BYTES)) if remaining > 0 else b""
            remaining -= len(data)
        with self._lock:
            self.requests[path] += 1
        return True
