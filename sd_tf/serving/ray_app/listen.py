"""Listen for HTTP in a front. Fronts on one node share the port: the system divides the callers."""

import asyncio
import socket
import time

import uvicorn
from fastapi import FastAPI

from sd_tf.serving.errors import ServingError

MOST_CONNECTIONS = 1000  # of a front; a further one gets status 503
READ_WITHIN = 60.0  # seconds that a client may leave an answer unread
BEGIN_WITHIN = 20.0  # seconds that a client may take to send a request's header
KEEP_ALIVE = 90  # seconds that a connection stays open between two requests
STOP_WITHIN = 10  # seconds that calls in progress have at the end


class HttpServer:
    """Serves an app from a task of the running event loop."""

    def __init__(
        self,
        app: FastAPI,
        host: str,
        port: int,
        read_within: float = READ_WITHIN,
        begin_within: float = BEGIN_WITHIN,
    ):
        self._socket = open_socket(host, port)
        # Connections inherit it: the system closes those whose client takes nothing for so long.
        timeout = round(1000 * read_within)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout)
        config = uvicorn.Config(
            app,
            http="h11",  # bounds a header's length; httptools does not
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=STOP_WITHIN,
        )
        self._server = uvicorn.Server(config)
        self.task = asyncio.create_task(self._server.serve([self._socket]))
        self._closing = asyncio.create_task(self._close_unused(begin_within))

    async def stop(self) -> None:
        self._closing.cancel()
        self._server.should_exit = True
        await self.task

    async def _close_unused(self, within: float) -> None:
        """Close connections whose client does not finish a request's header, again and again.

        uvicorn's own limit counts between two requests alone.
        """
        since: dict = {}  # connection → when it was first seen to wait for a header
        while True:
            await asyncio.sleep(within / 4)
            now = time.monotonic()
            waiting = filter(_waits_for_header, self._server.server_state.connections)
            since = {connection: since.get(connection, now) for connection in waiting}
            for connection, first in since.items():
                if now - first > within:
                    connection.transport.close()


def _waits_for_header(connection) -> bool:
    cycle = connection.cycle  # of the last request whose header was read
    is_between = connection.timeout_keep_alive_task is not None
    return not is_between and (cycle is None or cycle.response_complete)


def open_socket(host: str, port: int, shared: bool = True) -> socket.socket:
    """Bind to host and port. With `shared`, other fronts may listen on the same port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            opened.bind(address)
        except OSError:
            opened.close()
            raise
    except OSError as error:
        raise ServingError(f"{host}, port {port}, cannot be listened on: {error}") from error
    return opened


def check_free(host: str, *ports: int) -> None:
    """Refuse ports that anything listens on, fronts of another application included."""
    for port in ports:
        open_socket(host, port, shared=False).close()


def address(host: str, port: int) -> str:
    """Write host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
