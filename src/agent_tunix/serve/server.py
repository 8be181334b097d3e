"""`agent-tunix serve`: a model at an address of this machine, for clients of OpenAI's interface, until a signal ends it."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from agent_tunix.config.schema import ServeConfig
from agent_tunix.errors import UserError
from agent_tunix.serve.asking import Asking
from agent_tunix.serve.opened import open_model
from agent_tunix.serve.scheduler import Scheduler
from agent_tunix.training.guard import ended_as_by_interrupts
from agent_tunix.training.progress import say

ASKED = ("run", "step", "serve")  # what can be chosen for a run
TURN = 0.2  # seconds
PATIENCE = 2  # seconds for which answers under way may go on after a signal


def run(cfg: ServeConfig, overrides: Sequence[str], console: Console) -> None:
    """Opens the model and serves it until Ctrl-C."""
    uvicorn = _uvicorn()
    listening = _listening(cfg)  # before the model is loaded: a port that is taken is to be told of at once
    with listening:
        opened = open_model(cfg, overrides, ASKED, console)
        scheduler = Scheduler(opened.inference, opened.policy, cfg.serve.max_batch, cfg.serve.max_length)
        from agent_tunix.serve.app import app_of

        local = _is_local(cfg.serve.host)
        app = app_of(Asking(opened, scheduler), (cfg.serve.host, "127.0.0.1", "localhost", "[::1]") if local else None)
        quiet = {
            "log_level": "warning",
            "access_log": False,
            "lifespan": "off",
            "ws": "none",
            "loop": "asyncio",
            "http": "h11",
        }
        server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=PATIENCE, **quiet))
        host, port = cfg.serve.host, listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        try:
            with ended_as_by_interrupts():  # before it says that it serves
                if not local:
                    say(console, f"warning: serve.host={host} lets every machine that reaches this one ask the model.")
                say(console, f"{opened.name} is served at http://{shown}:{port}/v1 (Ctrl-C ends it)")
                _serve(server, listening)
        except KeyboardInterrupt:
            console.print("")
        finally:
            scheduler.close()


def _serve(server: Any, listening: socket.socket) -> None:
    """Until an interrupt, which is raised while this thread sleeps: uvicorn leaves signals alone in a thread of its own."""
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    serving.start()
    try:
        while serving.is_alive():
            time.sleep(TURN)
    finally:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # answers that are cut off now are no faults
        server.should_exit = True
        serving.join()


def _uvicorn() -> Any:
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as fault:
        raise UserError(f"serve needs {fault.name}: pip install 'agent-tunix[serve]'") from fault
    return uvicorn


def _listening(cfg: ServeConfig) -> socket.socket:
    """A socket at the address that is asked for."""
    host, port = cfg.serve.host, cfg.serve.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except socket.gaierror as fault:
        raise UserError(f"serve.host={host}: is no address of this machine ({fault.strerror}).") from fault
    except OSError as fault:
        if fault.errno in (errno.EADDRINUSE, errno.EACCES):
            raise UserError(f"Port {port} is in use or not allowed. Choose another: serve.port=<number>") from fault
        if fault.errno == errno.EADDRNOTAVAIL:
            raise UserError(f"serve.host={host}: is no address of this machine.") from fault
        raise


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
